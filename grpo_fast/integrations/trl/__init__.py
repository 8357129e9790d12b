"""TRL integration: `FastGRPOTrainer`, and `head.use_fast_head` for TRL's other trainers."""

from __future__ import annotations

from typing import Any


# Import on access, so that `import grpo_fast.integrations.trl.head` does not import TRL's
# GRPOTrainer.
def __getattr__(name: str) -> Any:
    if name != "FastGRPOTrainer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from grpo_fast.integrations.trl.trainer import FastGRPOTrainer

    return FastGRPOTrainer
