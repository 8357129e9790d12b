"""Integration into TRL: `FastGRPOTrainer`, and `head.use_fast_head` for other TRL trainers."""

from grpo_fast.integrations.trl.trainer import FastGRPOTrainer

__all__ = ["FastGRPOTrainer"]
