"""`LossConfig`, a frozen dataclass that holds and checks all options of the loss."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection
from typing import Any

from grpo_fast.errors import choice, conflict, number, require
from grpo_fast.objective.aggregation import AGGREGATIONS
from grpo_fast.objective.corrections import DEFAULT, Correction, corrections_of
from grpo_fast.objective.kl import EXACT, KL_ESTIMATORS
from grpo_fast.objective.losses import LEVELS, OBJECTIVES, VESPO_PARAMS, Objective

CHOICES: dict[str, Collection[str]] = {
    "loss_type": OBJECTIVES, "kl_estimator": (*KL_ESTIMATORS, *EXACT),
    "importance_sampling_level": LEVELS, "cispo_bound": ("raw", "offset"),
    "aggregation": AGGREGATIONS,
}  # fmt: skip
RANGES: tuple[tuple[tuple[str, ...], str, Callable[[float], bool]], ...] = (
    (("epsilon_low", "epsilon_high", "beta", *VESPO_PARAMS), "a finite number >= 0",
     lambda x: x >= 0),
    (("temperature", "sapo_temperature_pos", "sapo_temperature_neg", "delta", "softcap",
      "kl_clamp", "kl_input_clamp"), "a finite number > 0", lambda x: x > 0),
    (("entropy_coef",), "a finite number", lambda x: True),
    (("logit_scale",), "a finite number, not 0", lambda x: x != 0),
    (("dual_clip_c",), "a finite number > 1", lambda x: x > 1),
    (("top_entropy_quantile",), "a number in (0, 1]", lambda x: 0 < x <= 1),
    (("max_completion_length",), "a whole number > 0", lambda x: x > 0 and x == int(x)),
)  # fmt: skip
# Options that only some losses use. Changing one of them for a loss that ignores it is an error.
# epsilon_low and epsilon_high are not in the list, for two reasons. Users keep one clip range while
# they try several losses. And `replace` cannot know whether epsilon_high was set by the user.
LOSS_SPECIFIC_OPTIONS = (
    "delta", "dual_clip_c", "cispo_bound", "sapo_temperature_pos", "sapo_temperature_neg",
    *VESPO_PARAMS, "kl_estimator", "kl_times_ratio", "kl_clamp", "kl_input_clamp",
)  # fmt: skip


def reads_option(objective: Objective, option: str) -> bool:
    """Return whether an option of LOSS_SPECIFIC_OPTIONS has an effect with this objective."""
    if option.startswith("kl_"):
        return objective.reference
    return {"cispo_bound": "ratio_max"}.get(option, option) in objective.params


@dataclasses.dataclass(frozen=True)
class LossConfig:
    """All options of `grpo_loss`, `linear_grpo_loss` and `logits_grpo_loss`.

    The losses page has the formulas. A config is immutable, and `replace` returns a changed copy.

    Objective
        loss_type: str. The loss: "reinforce", "unclipped", "grpo", "bnpo", "dr_grpo", "dapo",
            "luspo", "dual_clip", "cispo", "sapo", "gspo", "gspo_token", "gmpo", "vespo", "dppo_tv",
            "dppo_kl", "kimi" or "dro".
        epsilon_low: float. The ratio is clipped from below at 1 - epsilon_low. "gmpo" clips the log
            ratio at -epsilon_low instead. For "dppo_tv", epsilon_low and epsilon_high bound the
            change of the probability of a token. For "dppo_kl", they bound a KL divergence.
        epsilon_high: float. The ratio is clipped from above at 1 + epsilon_high. None: the value of
            epsilon_low. For "cispo" it is the upper bound of the ratio itself, 5.0 by default.
        importance_sampling_level: str. "token" uses one ratio per token. "sequence" uses one ratio
            per completion, the exponential of the mean log ratio (GSPO). "sequence_sum" uses the
            exponential of the sum of the log ratios. With loss_type "gspo" the default is
            "sequence".
        aggregation: str. How tokens are averaged: "sequence_mean", "token_mean_local",
            "token_mean_global", "fixed_length" or "sequence_sum". None: the default of the loss
            type.
        max_completion_length: int. Maximum number of tokens of a completion. Required by
            aggregation "fixed_length".

    KL to the reference
        beta: float. Weight of the KL to the reference policy. Unless beta is 0, `ref_logps` is
            required. For "kimi" and "dro" beta is the weight of the squared log ratio, and no
            reference is used.
        kl_estimator: str. "k1", "abs", "k2", "k3", "k3+" or "k1+". "exact" and
            "exact_reference_first" are for trainers that add `linear_divergence` to the loss. The
            loss functions reject them.
        kl_times_ratio: bool. Multiply the KL by the importance ratio. Gradients flow through both
            factors. TRL calls this option `use_bias_correction_kl`.
        kl_clamp: float. Clamp the KL of a token to ±kl_clamp. None: no clamp. A clamped token has
            no KL gradient, except with "k3+" and "k1+".
        kl_input_clamp: float. Clamp ref_logp - logp to ±kl_input_clamp before the KL is estimated.
            None: no clamp.

    Logits
        temperature: float. Sampling temperature. The logits are z = softcap * tanh(logit_scale *
            raw / softcap) / temperature.
        softcap: float. Bound of the logits (`final_logit_softcapping` of Gemma). None: no bound.
        logit_scale: float. Factor of the logits (`logit_scale` of Cohere).

    Filters and corrections
        top_entropy_quantile: float. Fraction of the tokens to keep. The tokens with the highest
            entropy are kept. 1.0 keeps all tokens.
        corrections: a `Correction`, or a list of them. They weight or mask the policy loss by the
            ratio between the policy and the sampler (`sampling_logps`). A dictionary with the
            fields of a Correction is accepted, too. () disables corrections.

    Entropy
        entropy_coef: float. Weight of an entropy bonus, which is subtracted from the loss.
        compute_entropy: bool. Return entropies even if the loss does not need them.

    Options of single losses
        delta: float. Upper bound of the unclipped ratio (INTELLECT-2), for "grpo" and its variants.
            None: no bound.
        dual_clip_c: float. For A < 0 the loss of "dual_clip" is at most -dual_clip_c·A.
        cispo_bound: str. "raw" clips the ratio of "cispo" from above at epsilon_high. "offset"
            clips it from below at 1 - epsilon_low and from above at 1 + epsilon_high.
        sapo_temperature_pos: float. τ of "sapo" for A > 0.
        sapo_temperature_neg: float. τ of "sapo" for A <= 0.
        vespo_k_pos: float. k of "vespo" for A >= 0.
        vespo_lambda_pos: float. λ of "vespo" for A >= 0.
        vespo_k_neg: float. k of "vespo" for A < 0.
        vespo_lambda_neg: float. λ of "vespo" for A < 0.

    Raises:
        ValueError: an option is out of range, two options exclude each other, or the loss type does
            not read an option that was changed. The message names the option.

    Example:
        >>> from grpo_fast import LossConfig
        >>> config = LossConfig(loss_type="grpo", epsilon_high=0.28, beta=0.04)
        >>> config.aggregation
        'sequence_mean'
        >>> config.replace(beta=0.0).uses_reference
        False
    """

    loss_type: str = "dapo"
    epsilon_low: float = 0.2
    epsilon_high: float | None = None
    delta: float | None = None
    beta: float = 0.0
    kl_estimator: str = "k3"
    kl_times_ratio: bool = False
    temperature: float = 1.0
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

    def __post_init__(self) -> None:
        for name, choices in CHOICES.items():
            if not (getattr(self, name) is None and getattr(LossConfig, name) is None):
                choice(name, getattr(self, name), choices)
        # Set the field through `object`, because assignment raises an error in a frozen dataclass.
        object.__setattr__(self, "corrections", corrections_of(self.corrections))
        self._fill_defaults()
        self._check_ranges()
        self._check_combinations()

    def _fill_defaults(self) -> None:
        """Set the defaults that depend on the loss type, so that repr shows the actual values."""
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
                kind = "None or " if getattr(LossConfig, name) is None else ""
                if not (value is None and kind):
                    number(name, value, kind + expected, holds)
        for name in ("kl_times_ratio", "compute_entropy"):
            value = getattr(self, name)
            require(isinstance(value, bool), name, "True or False", repr(value))

    def _check_combinations(self) -> None:
        objective = OBJECTIVES[self.loss_type]
        loss = f"loss_type={self.loss_type!r}"
        # 1. Check the level of the ratio.
        level = self.importance_sampling_level
        if level not in objective.levels:
            why = f"choose one of {list(objective.levels)}"
            raise conflict(f"importance_sampling_level={level!r}", loss, why)
        # 2. Check the number that the aggregation needs.
        if self.aggregation == "fixed_length" and self.max_completion_length is None:
            why = "the mean needs this number; pass max_completion_length"
            raise conflict("max_completion_length=None", "aggregation='fixed_length'", why)
        # 3. Reject options that have no effect, unless they have their default values.
        for name in LOSS_SPECIFIC_OPTIONS:
            value = getattr(self, name)
            default = getattr(LossConfig, name)
            if value == default:
                continue
            if name.startswith("kl_") and name != "kl_estimator" and self.kl_estimator in EXACT:
                why = "an exact KL is not estimated from the sampled token's logps"
                raise conflict(f"{name}={value!r}", f"kl_estimator={self.kl_estimator!r}", why)
            if not reads_option(objective, name):
                readers = ", ".join(loss for loss, x in OBJECTIVES.items() if reads_option(x, name))
                why = f"this loss does not read it; leave it at {default!r}"
                raise conflict(f"{name}={value!r}", loss, f"{why} (it is read by {readers})")
        # 4. Reject corrections by a ratio with the current policy if the loss contains this ratio.
        of_current = [x for x in self.corrections if x.weighs and x.ratio != "old/sampling"]
        if of_current and objective.ratio_kind == "sum":
            why = "the loss weighs current/old itself; use 'old/sampling'"
            raise conflict(f"corrections.ratio={of_current[0].ratio!r}", loss, why)

    @property
    def params(self) -> tuple[float, ...]:
        """Return the hyperparameters of the loss function, in the order of its arguments."""
        offset = self.cispo_bound == "offset"
        high = self.epsilon_high
        assert high is not None  # the constructor has replaced None with the default
        derived = {
            "delta": float("inf") if self.delta is None else self.delta,
            "ratio_min": 1.0 - self.epsilon_low if offset else 0.0,
            "ratio_max": 1.0 + high if offset else high,
            # Use the lower bound of TRL. With λ = 0, the weight φ of a token would be unbounded.
            "vespo_lambda_pos": max(self.vespo_lambda_pos, 1e-4),
            "vespo_lambda_neg": max(self.vespo_lambda_neg, 1e-4),
        }
        names = OBJECTIVES[self.loss_type].params
        return tuple(float(derived[x] if x in derived else getattr(self, x)) for x in names)

    @property
    def kl_limits(self) -> tuple[float, float]:
        """Return (kl_clamp, kl_input_clamp), the last two arguments of a KL estimator.

        An option that is None becomes inf.
        """
        value_max = float("inf") if self.kl_clamp is None else float(self.kl_clamp)
        d_max = float("inf") if self.kl_input_clamp is None else float(self.kl_input_clamp)
        return value_max, d_max

    @property
    def uses_reference(self) -> bool:
        """Return whether the loss contains a KL to a reference, which requires `ref_logps`."""
        return self.beta != 0 and OBJECTIVES[self.loss_type].reference

    @property
    def needs_entropy(self) -> bool:
        """Return whether the loss or the caller needs the entropy of every row."""
        return self.compute_entropy or self.entropy_coef != 0 or self.top_entropy_quantile < 1

    @property
    def is_token_local(self) -> bool:
        """Return whether dL/dlogp of a row depends only on that row.

        One pass over the logits then computes the loss and its gradient.
        """
        return (
            OBJECTIVES[self.loss_type].ratio_kind == "ratio"
            and self.importance_sampling_level == "token"
            and self.top_entropy_quantile == 1
            and all(x.ratio == "old/sampling" for x in self.corrections)
        )

    def replace(self, **changes: Any) -> LossConfig:
        """Return a copy with some fields changed.

        A default that depends on the loss type keeps its old value in the copy, even if the loss
        type changes.

        Args:
            changes: the fields to change.
        """
        return dataclasses.replace(self, **changes)
