"""Public names of grpo_fast, a kernel-level GRPO engine.

Each name is imported on first use, so that `grpo-fast --help` does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from grpo_fast.kernels.divergence import DivergenceTerm as DivergenceTerm
    from grpo_fast.kernels.divergence import TeacherHead as TeacherHead
    from grpo_fast.kernels.divergence import TeacherTopK as TeacherTopK
    from grpo_fast.kernels.types import Support as Support
    from grpo_fast.loss.api import grpo_loss as grpo_loss
    from grpo_fast.loss.api import linear_grpo_loss as linear_grpo_loss
    from grpo_fast.loss.api import linear_logps as linear_logps
    from grpo_fast.loss.api import logits_grpo_loss as logits_grpo_loss
    from grpo_fast.loss.api import logits_logps as logits_logps
    from grpo_fast.loss.divergence import linear_divergence as linear_divergence
    from grpo_fast.loss.entry import LossOutput as LossOutput
    from grpo_fast.objective.advantages import group_advantages as group_advantages
    from grpo_fast.objective.config import LossConfig as LossConfig
    from grpo_fast.objective.corrections import Correction as Correction

__version__ = "0.1.0"
_HOMES = {
    "Correction": "objective.corrections",
    "DivergenceTerm": "kernels.divergence",
    "LossConfig": "objective.config",
    "LossOutput": "loss.entry",
    "Support": "kernels.types",
    "TeacherHead": "kernels.divergence",
    "TeacherTopK": "kernels.divergence",
    "group_advantages": "objective.advantages",
    "grpo_loss": "loss.api",
    "linear_divergence": "loss.divergence",
    "linear_grpo_loss": "loss.api",
    "linear_logps": "loss.api",
    "logits_grpo_loss": "loss.api",
    "logits_logps": "loss.api",
}
__all__ = [*_HOMES]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
