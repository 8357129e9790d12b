"""Integration into TRL: `FastGRPOTrainer`, and `head.use_fast_head` for other TRL trainers."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from grpo_fast.integrations.trl.trainer import FastGRPOTrainer


# Import FastGRPOTrainer only when it is accessed. The modules of this package can then be imported
# without TRL's GRPOTrainer.
def __getattr__(name: str) -> type[FastGRPOTrainer]:
    if name != "FastGRPOTrainer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from grpo_fast.integrations.trl.trainer import FastGRPOTrainer

    return FastGRPOTrainer
