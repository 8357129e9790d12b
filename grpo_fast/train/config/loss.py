"""`loss:` of a run: the fields and defaults of `LossConfig`, and the names some of them had."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal, get_type_hints

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
    return create_model(name, __base__=base, **{k: v for k, v in fields.items() if v is not None})


CorrectionSettings = _settings("CorrectionSettings", Correction, Section, WORDS)
_DEFAULT = [CorrectionSettings(**dataclasses.asdict(x)) for x in LossConfig.corrections]
# The fields and defaults of LossConfig, which `RunConfig.loss_config` checks. The temperature is
# that of the rollout where it is None, the group's size always.
LossSettings = _settings(
    "LossSettings", LossConfig, LossSection, CHOICES, temperature=(float | None, None),
    group_size=None, corrections=(list[CorrectionSettings], Field(_DEFAULT)),  # type: ignore[valid-type]
)  # fmt: skip
