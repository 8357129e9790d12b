"""β, the weight of the KL to the reference: fixed, or led towards a KL that is wanted."""

from __future__ import annotations

import math

from grpo_fast.train.config import KLConfig

MOST = 0.2  # of the relative error that one step answers to


class KLWeight:
    """The weight as it is now.

    Args:
        beta: at the start.
        config: `target`, where it adapts, and `horizon`, over which it does (1909.08593).
    """

    def __init__(self, beta: float, config: KLConfig) -> None:
        self.value, self.config = float(beta), config

    def after_step(self, kl: float, completions: int) -> None:
        """β ← β·(1 + completions/horizon·clip(kl/target − 1, ±0.2)); a KL of NaN moves nothing."""
        if self.config.target is None or math.isnan(kl):
            return
        error = min(max(kl / self.config.target - 1, -MOST), MOST)
        # Of a step beyond the horizon no more is counted: the weight would reach 0 and stay there.
        self.value *= 1 + error * min(completions / self.config.horizon, 1.0)
