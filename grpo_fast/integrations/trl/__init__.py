"""TRL on our kernels: `FastGRPOTrainer` here, `use_fast_head` in `head` for its other trainers."""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:  # `head` alone must not import TRL's GRPOTrainer
    if name != "FastGRPOTrainer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from grpo_fast.integrations.trl.trainer import FastGRPOTrainer

    return FastGRPOTrainer
