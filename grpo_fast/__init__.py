"""Public names of grpo_fast, a kernel-level GRPO engine.

Each name is imported on first use, so that `grpo-fast --help` does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from grpo_fast.kernels.support import Support
    from grpo_fast.kernels.teachers import DivergenceTerm, TeacherHead, TeacherTopK
    from grpo_fast.loss.api import (
        grpo_loss,
        linear_grpo_loss,
        linear_logps,
        logits_grpo_loss,
        logits_logps,
    )
    from grpo_fast.loss.call import LossOutput
    from grpo_fast.loss.divergence import linear_divergence
    from grpo_fast.objective.advantages import group_advantages
    from grpo_fast.objective.config import LossConfig
    from grpo_fast.objective.corrections import Correction

__version__ = "0.1.0"
__all__ = [
    "Correction",
    "DivergenceTerm",
    "LossConfig",
    "LossOutput",
    "Support",
    "TeacherHead",
    "TeacherTopK",
    "group_advantages",
    "grpo_loss",
    "linear_divergence",
    "linear_grpo_loss",
    "linear_logps",
    "logits_grpo_loss",
    "logits_logps",
]

_HOMES = {
    "Correction": "objective.corrections",
    "DivergenceTerm": "kernels.teachers",
    "LossConfig": "objective.config",
    "Support": "kernels.support",
    "TeacherHead": "kernels.teachers",
    "TeacherTopK": "kernels.teachers",
    "linear_divergence": "loss.divergence",
    "group_advantages": "objective.advantages",
}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES.get(name, 'loss.api')}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
