"""TRL integration: `FastGRPOTrainer`, and `head.use_fast_head` for TRL's other trainers."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from grpo_fast.integrations.trl.trainer import FastGRPOTrainer


# Import on access, so that `import grpo_fast.integrations.trl.head` does not import TRL's
# GRPOTrainer.
def __getattr__(name: str) -> type[FastGRPOTrainer]:
    if name != "FastGRPOTrainer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from grpo_fast.integrations.trl.trainer import FastGRPOTrainer

    return FastGRPOTrainer
