"""`LossConfig`: every option of the loss, validated once, in one frozen dataclass."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Collection
from typing import Any

from torch import Tensor

from grpo_fast.errors import choice, conflict, names_nearest, number, require
from grpo_fast.objective.aggregation import AGGREGATIONS
from grpo_fast.objective.corrections import DEFAULT, Correction, corrections_of
from grpo_fast.objective.kl import EXACT, KL_ESTIMATORS
from grpo_fast.objective.losses import LEVELS, OBJECTIVES, VESPO_PARAMS, Objective

CHOICES: dict[str, Collection[str]] = {
    "loss_type": OBJECTIVES, "kl_estimator": (*KL_ESTIMATORS, *EXACT),
    "importance_sampling_level": LEVELS, "cispo_bound": ("raw", "offset"),
    "aggregation": AGGREGATIONS, "entropy_over": ("support", "vocabulary"),
}  # fmt: skip
RANGES: tuple[tuple[tuple[str, ...], str, Callable[[float], bool]], ...] = (
    (("epsilon_low", "epsilon_high", "beta", *VESPO_PARAMS), "a finite number >= 0",
     lambda x: x >= 0),
    (("sapo_temperature_pos", "sapo_temperature_neg", "delta", "softcap", "kl_clamp",
      "kl_input_clamp"), "a finite number > 0", lambda x: x > 0),
    (("entropy_coef",), "a finite number", lambda x: True),
    (("logit_scale",), "a finite number, not 0", lambda x: x != 0),
    (("dual_clip_c",), "a finite number > 1", lambda x: x > 1),
    (("top_entropy_quantile",), "a number in (0, 1]", lambda x: 0 < x <= 1),
    (("max_completion_length", "group_size"), "a whole number > 0",
     lambda x: x > 0 and x == int(x)),
)  # fmt: skip
NULLABLE = (
    "aggregation", "delta", "softcap", "max_completion_length", "kl_clamp", "kl_input_clamp",
    "group_size",
)  # fmt: skip

# Options that only some losses read: given to another one they would be ignored, so they are
# refused (`reads`). Not the clip range: one range is kept while losses are tried in turn, and
# `replace` keeps one that was filled in.
LOSS_SPECIFIC_OPTIONS = (
    "delta", "dual_clip_c", "cispo_bound", "sapo_temperature_pos", "sapo_temperature_neg",
    *VESPO_PARAMS, "kl_estimator", "kl_times_ratio", "kl_clamp", "kl_input_clamp",
)  # fmt: skip


def reads_option(objective: Objective, option: str) -> bool:
    """Whether one of LOSS_SPECIFIC_OPTIONS does something for this objective or its KL."""
    if option.startswith("kl_"):
        return objective.reference
    return {"cispo_bound": "ratio_max"}.get(option, option) in objective.params


@names_nearest
@dataclasses.dataclass(frozen=True)
class LossConfig:
    """The options of `grpo_loss`, `linear_grpo_loss`, `logits_grpo_loss` (formulas: README.md).

    Objective
        loss_type: a name of `grpo_fast.objective.losses.OBJECTIVES`.
        epsilon_low, epsilon_high: clip range of the ratio, `[1 - epsilon_low, 1 + epsilon_high]`;
            `epsilon_high=None` means `epsilon_low`. For `cispo` `epsilon_high` is the raw upper
            bound (default 5.0) unless `cispo_bound="offset"`; for `gmpo` both are in log space; for
            `dppo_*` they are divergence thresholds.
        delta: upper bound of the unclipped ratio (INTELLECT-2), or None; of the `grpo` family.
        importance_sampling_level: "token", or one ratio per completion: the exponential of the mean
            log ratio ("sequence", GSPO) or of their sum ("sequence_sum"). `gspo` takes "token", the
            default, for "sequence".
        aggregation: how tokens are averaged; None takes the loss type's own.
        max_completion_length: tokens; required by `aggregation="fixed_length"`.
        group_size: completions of a prompt, side by side; required by `aggregation="prompt_mean"`.
    KL to the reference
        beta, kl_estimator: weight and estimator (`grpo_fast.objective.kl.KL_ESTIMATORS`);
            `ref_logps` is required when beta != 0. The losses refuse "exact" and
            "exact_reference_first": a trainer adds `linear_divergence` to them.
        kl_times_ratio: multiply the KL by the importance ratio, with gradient through both.
        kl_clamp, kl_input_clamp: the KL's value, and the d = ref_logp - logp it is taken of, stay
            in ± this; beyond it a token has no gradient (with k3+ and k1+ that of k2). None: no
            clamp.
        For `kimi` beta weighs the squared log-ratio to `old_logps` instead, and there is no
        reference.
    Logits
        logit_scale, softcap, temperature: `z = softcap * tanh(logit_scale * raw / softcap) /
            temperature`; temperature may be a float tensor with one value per token (the layout of
            `target_ids`).
    Filters and corrections
        top_entropy_quantile: keep this fraction of the tokens, those of highest entropy.
        corrections: how `sampling_logps`, when given, weigh and mask the policy loss: one
            `Correction` or several, as objects or as their fields; () for none.
    Entropy
        entropy_coef: weight of the entropy bonus; compute_entropy: return entropy without one.
        entropy_over: beside a support every entropy is over the ids that the sampler kept
            ("support"), so that a bonus spreads mass among those alone; or over the "vocabulary",
            whose bonus also pulls at ids that could not be drawn, at the price of the dense head.

    Raises:
        ValueError: an option out of range, two that exclude each other, or one changed from its
            default that this loss type does not read (`LOSS_SPECIFIC_OPTIONS`); the message names the field.
    """

    loss_type: str = "dapo"
    epsilon_low: float = 0.2
    epsilon_high: float | None = None
    delta: float | None = None
    beta: float = 0.0
    kl_estimator: str = "k3"
    kl_times_ratio: bool = False
    temperature: float | Tensor = 1.0
    softcap: float | None = None
    logit_scale: float = 1.0
    importance_sampling_level: str = "token"
    aggregation: str | None = None
    max_completion_length: int | None = None
    entropy_coef: float = 0.0
    top_entropy_quantile: float = 1.0
    sapo_temperature_pos: float = 1.0
    sapo_temperature_neg: float = 1.05
    vespo_k_pos: float = 2.0
    vespo_lambda_pos: float = 3.0
    vespo_k_neg: float = 3.0
    vespo_lambda_neg: float = 2.0
    compute_entropy: bool = False
    dual_clip_c: float = 3.0
    cispo_bound: str = "raw"
    corrections: tuple[Correction, ...] = DEFAULT
    kl_clamp: float | None = None
    kl_input_clamp: float | None = None
    group_size: int | None = None
    entropy_over: str = "support"

    def __eq__(self, other: object) -> bool:
        """By value; a temperature tensor is equal to itself, as its hash says."""
        if not isinstance(other, LossConfig):
            return NotImplemented
        pairs = ((getattr(self, f.name), getattr(other, f.name)) for f in dataclasses.fields(self))
        return all(
            a is b or not (isinstance(a, Tensor) or isinstance(b, Tensor)) and a == b
            for a, b in pairs
        )

    def __post_init__(self) -> None:
        for name, choices in CHOICES.items():
            if getattr(self, name) is not None or name not in NULLABLE:
                choice(name, getattr(self, name), choices)
        object.__setattr__(self, "corrections", corrections_of(self.corrections))
        self._fill_defaults()
        self._check_ranges()
        self._check_combinations()
        plain = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        if isinstance(self.temperature, Tensor):
            plain["temperature"] = 1.0
        plain["corrections"] = [dataclasses.asdict(x) for x in self.corrections]
        object.__setattr__(self, "_key", json.dumps(plain))

    @property
    def key(self) -> str:
        """The config as a string; a temperature tensor travels beside it."""
        key: str = self.__dict__["_key"]
        return key

    @staticmethod
    @functools.lru_cache(maxsize=256)
    def from_key(key: str) -> LossConfig:
        """The config whose `key` this is: custom operators carry it through torch.compile."""
        return LossConfig(**json.loads(key))

    def _fill_defaults(self) -> None:
        """Resolve the defaults that depend on the loss type: a config prints what it does."""
        objective = OBJECTIVES[self.loss_type]
        if self.epsilon_high is None:
            raw = objective.raw_epsilon_high if self.cispo_bound == "raw" else None
            object.__setattr__(self, "epsilon_high", self.epsilon_low if raw is None else raw)
        if self.aggregation is None:
            object.__setattr__(self, "aggregation", objective.aggregation)
        if objective.levels == ("sequence",) and self.importance_sampling_level == "token":
            object.__setattr__(self, "importance_sampling_level", "sequence")

    def _check_ranges(self) -> None:
        for names, expected, holds in RANGES:
            for name in names:
                value = getattr(self, name)
                kind = "None or " if name in NULLABLE else ""
                if not (value is None and kind):
                    number(name, value, kind + expected, holds)
        for name in ("kl_times_ratio", "compute_entropy"):
            value = getattr(self, name)
            require(isinstance(value, bool), name, "True or False", repr(value))
        if isinstance(self.temperature, Tensor):
            fits = self.temperature.is_floating_point()
            came = f"dtype {self.temperature.dtype}"
            require(fits, "temperature", "a float or a float tensor", came)
        else:
            number("temperature", self.temperature, "a finite number > 0", lambda x: x > 0)

    def _check_combinations(self) -> None:
        objective = OBJECTIVES[self.loss_type]
        loss = f"loss_type={self.loss_type!r}"
        level = self.importance_sampling_level
        if level not in objective.levels:
            why = f"choose one of {list(objective.levels)}"
            raise conflict(f"importance_sampling_level={level!r}", loss, why)
        for name, aggregation in (
            ("max_completion_length", "fixed_length"),
            ("group_size", "prompt_mean"),
        ):
            if self.aggregation == aggregation and getattr(self, name) is None:
                why = f"the mean needs this number; pass {name}"
                raise conflict(f"{name}=None", f"aggregation={aggregation!r}", why)
        for name in ("kl_times_ratio", "kl_clamp", "kl_input_clamp"):
            value = getattr(self, name)
            default = getattr(LossConfig, name)
            if value != default and self.kl_estimator in EXACT:
                why = "an exact KL is not estimated from the sampled token's logps"
                raise conflict(f"{name}={value!r}", f"kl_estimator={self.kl_estimator!r}", why)
        for name in LOSS_SPECIFIC_OPTIONS:
            value = getattr(self, name)
            default = getattr(LossConfig, name)
            if value != default and not reads_option(objective, name):
                readers = ", ".join(loss for loss, x in OBJECTIVES.items() if reads_option(x, name))
                why = (
                    f"this loss does not read it; leave it at {default!r} (it is read by {readers})"
                )
                raise conflict(f"{name}={value!r}", loss, why)
        of_current = [x for x in self.corrections if x.weighs and x.ratio != "old/sampling"]
        if of_current and objective.ratio_kind == "sum":
            why = "the loss weighs current/old itself; use 'old/sampling'"
            raise conflict(f"corrections.ratio={of_current[0].ratio!r}", loss, why)

    @property
    def params(self) -> tuple[float, ...]:
        """The leaf's hyperparameters, in the leaf's order."""
        offset = self.cispo_bound == "offset"
        high = self.high_bound
        derived = {
            "delta": float("inf") if self.delta is None else self.delta,
            "ratio_min": 1.0 - self.epsilon_low if offset else 0.0,
            "ratio_max": 1.0 + high if offset else high,
            # TRL bounds λ below by 1e-4, so that φ still falls off.
            "vespo_lambda_pos": max(self.vespo_lambda_pos, 1e-4),
            "vespo_lambda_neg": max(self.vespo_lambda_neg, 1e-4),
        }
        names = OBJECTIVES[self.loss_type].params
        return tuple(float(derived[x] if x in derived else getattr(self, x)) for x in names)

    @property
    def high_bound(self) -> float:
        """`epsilon_high`, which every config has: its default is filled in."""
        assert self.epsilon_high is not None
        return self.epsilon_high

    @property
    def kl_limits(self) -> tuple[float, float]:
        """The estimator's clamps, in its order."""
        clamps = (self.kl_clamp, self.kl_input_clamp)
        return tuple(float("inf") if x is None else float(x) for x in clamps)  # type: ignore[return-value]

    @property
    def uses_reference(self) -> bool:
        """True when there is a KL to a reference: the losses read `ref_logps`."""
        return self.beta != 0 and OBJECTIVES[self.loss_type].reference

    @property
    def needs_entropy(self) -> bool:
        """True when the entropy of every row is computed."""
        return self.compute_entropy or self.entropy_coef != 0 or self.top_entropy_quantile < 1

    @property
    def entropy_over_vocabulary(self) -> bool:
        """True when entropies are over the whole vocabulary, also beside a support."""
        return self.needs_entropy and self.entropy_over == "vocabulary"

    @property
    def is_token_local(self) -> bool:
        """True when dL/dlogp of a row follows from that row alone: one pass is enough."""
        return (
            OBJECTIVES[self.loss_type].ratio_kind == "ratio"
            and self.importance_sampling_level == "token"
            and self.top_entropy_quantile == 1
            and all(x.ratio == "old/sampling" for x in self.corrections)
        )

    def replace(self, **changes: Any) -> LossConfig:
        """A copy with some fields changed; defaults that were resolved stay as they are."""
        return dataclasses.replace(self, **changes)
