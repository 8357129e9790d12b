"""`loss:` of a run: the fields and defaults of `LossConfig`, and the names some of them had."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_type_hints

from pydantic import Field, create_model, model_validator

from grpo_fast.errors import conflict, number
from grpo_fast.objective.config import CHOICES, NULLABLE, LossConfig
from grpo_fast.objective.corrections import WORDS, Correction
from grpo_fast.train.config.base import Section, require

OLD_NAMES = ("sampling_correction", "sampling_ratio_cap", "off_policy_threshold")
OLD_WORDS = {
    f"{old}_{kind}": {"kind": kind, "level": level}
    for old, level in (("token", "token"), ("sequence", "product"))
    for kind in ("truncate", "mask")
}


# What `grpo-fast config loss` prints; formulas are in objective/README.md.
SENTENCES = {
    "loss_type": "The objective: grpo, dapo, cispo, gspo, and so on.",
    "epsilon_low": "The ratio is clipped below 1 - epsilon_low.",
    "epsilon_high": "The ratio is clipped above 1 + epsilon_high; null means epsilon_low.",
    "delta": "Upper bound of the unclipped ratio (INTELLECT-2).",
    "beta": "Weight of the KL to the reference.",
    "kl_estimator": "Estimator of the KL to the reference.",
    "kl_times_ratio": "Multiply the KL by the importance ratio.",
    "temperature": "Temperature of the log-probabilities; null means rollout.temperature.",
    "softcap": "Softcap of the logits; the trainer takes the model's.",
    "logit_scale": "Scale of the logits; the trainer takes the model's.",
    "importance_sampling_level": "One ratio per token, or one per completion.",
    "aggregation": "How token losses are averaged; null takes the loss type's.",
    "max_completion_length": "Divisor of fixed_length; null means rollout.max_new_tokens.",
    "entropy_coef": "Weight of the entropy bonus.",
    "top_entropy_quantile": "Train on this fraction of the tokens, those of the highest entropy.",
    "sapo_temperature_pos": "SAPO's temperature for positive advantages.",
    "sapo_temperature_neg": "SAPO's temperature for negative advantages.",
    "vespo_k_pos": "VESPO's exponent for positive advantages.",
    "vespo_lambda_pos": "VESPO's rate for positive advantages.",
    "vespo_k_neg": "VESPO's exponent for negative advantages.",
    "vespo_lambda_neg": "VESPO's rate for negative advantages.",
    "compute_entropy": "Log the entropy even without an entropy bonus.",
    "dual_clip_c": "Upper bound of the ratio at negative advantages (dual clip).",
    "cispo_bound": "Whether CISPO reads epsilon_high as the bound itself or as an offset from 1.",
    "corrections": "Corrections of the loss by the sampler's log-probabilities.",
    "kl_clamp": "The KL of a token is clamped to this range.",
    "kl_input_clamp": "The log ratio in the KL is clamped to this range.",
    "entropy_over": "Entropy over the tokens that the sampler kept, or over the vocabulary.",
    "kind": "Truncate the ratio, mask its weight outside the bounds, or reject those tokens.",
    "low": "Lower bound of the ratio.",
    "high": "Upper bound of the ratio.",
    "level": "The ratio of a token, or of a completion.",
    "ratio": "Which two policies the ratio compares.",
    "advantages": "Correct all tokens, or only those with a negative advantage.",
}


class LossSection(Section):
    """The base of `LossSettings`: it reads the names that older recipes have."""

    @model_validator(mode="before")
    @classmethod
    def _read_old_names(cls, settings: Any) -> Any:
        if not isinstance(settings, dict) or settings.keys().isdisjoint(OLD_NAMES):
            return settings
        rest = {name: value for name, value in settings.items() if name not in OLD_NAMES}
        if "corrections" in rest:
            older = next(name for name in OLD_NAMES if name in settings)
            raise conflict("corrections", older, "the older name says the same; keep corrections")
        word = settings.get("sampling_correction", "token_truncate")
        cap, threshold = settings.get("sampling_ratio_cap"), settings.get("off_policy_threshold")
        words = [*OLD_WORDS, None]
        require(word in words, "sampling_correction", f"one of {words}", repr(word))
        if word is None and cap not in (None, 3.0):
            why = "a cap needs a correction whose ratio it bounds"
            raise conflict(f"sampling_ratio_cap={cap}", "sampling_correction=null", why)
        high = 3.0 if cap is None else cap
        corrections = [] if word is None else [{**OLD_WORDS[word], "high": high}]
        if threshold is not None:
            number("off_policy_threshold", threshold, "a number >= 0", lambda x: x >= 0)
            corrections.append(
                {"kind": "reject", "low": math.exp(-threshold), "level": "geometric",
                 "ratio": "current/behaviour", "advantages": "negative"}
            )  # fmt: skip
        return {**rest, "corrections": corrections}


def _settings(name: str, kind: Any, base: Any, words: Mapping[str, Any], **own: Any) -> Any:
    """A section with a dataclass's fields and defaults.

    Args:
        words: what a field is chosen from, by its name.
        own: pydantic's (type, default) in place of a field's; None: it is no setting.
    """
    hints = get_type_hints(kind)
    hints |= {name: Literal[(*choices, *([None] if name in NULLABLE else []))]
              for name, choices in words.items()}  # fmt: skip
    fields: Any = {f.name: (hints[f.name], f.default) for f in dataclasses.fields(kind)} | own
    described: Any = {
        key: (Annotated[field[0], Field(description=SENTENCES[key])], field[1])
        for key, field in fields.items() if field is not None
    }  # fmt: skip
    return create_model(name, __base__=base, **described)


CorrectionSettings = _settings("CorrectionSettings", Correction, Section, WORDS)
_DEFAULT = [CorrectionSettings(**dataclasses.asdict(x)) for x in LossConfig.corrections]
# The fields and defaults of LossConfig, which `RunConfig.loss_config` checks. The temperature is
# that of the rollout where it is None, the group's size always.
LossSettings = _settings(
    "LossSettings", LossConfig, LossSection, CHOICES, temperature=(float | None, None),
    group_size=None, corrections=(list[CorrectionSettings], Field(_DEFAULT)),  # type: ignore[valid-type]
)  # fmt: skip
