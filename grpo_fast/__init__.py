"""grpo_fast: a kernel-level GRPO engine. The public names; see README.md."""

from grpo_fast.advantages import group_advantages
from grpo_fast.config import LossConfig
from grpo_fast.loss import LossOutput, grpo_loss, linear_grpo_loss, linear_logps, logits_grpo_loss, logits_logps

__version__ = "0.1.0"
__all__ = [
    "LossConfig",
    "LossOutput",
    "group_advantages",
    "grpo_loss",
    "linear_grpo_loss",
    "linear_logps",
    "logits_grpo_loss",
    "logits_logps",
]
