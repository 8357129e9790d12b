"""AdamW with a schedule, and a step that survives a bad gradient."""

from __future__ import annotations

import logging
import math

import torch
from torch import nn

from grpo_fast.train.config import OptimConfig

log = logging.getLogger(__name__)

MAX_SKIPS_IN_A_ROW = 3


class NonFiniteGradient(RuntimeError):
    """Too many gradients in a row were NaN or infinite."""


class Optimizer:
    """Clip → step → schedule. A gradient that is not finite is dropped and counted; the third in a row ends the run."""

    def __init__(self, parameters: list[nn.Parameter], config: OptimConfig, total_steps: int) -> None:
        if not parameters:
            raise ValueError("parameters: expected at least one that is trained, came none")
        self.parameters, self.config, self.total_steps = parameters, config, total_steps
        self.adam = torch.optim.AdamW(
            parameters, lr=config.lr, betas=config.betas, eps=config.eps, weight_decay=config.weight_decay, fused=True
        )
        self.steps = self.skipped = self._skipped_in_a_row = 0

    @property
    def learning_rate(self) -> float:
        """The rate of the next step."""
        return self.config.lr * schedule(self.config.schedule, self.steps, self.config.warmup, self.total_steps)

    def step(self) -> float:
        """Apply the gradients and clear them; returns their norm before clipping (inf or NaN: the step was skipped)."""
        norm = float(nn.utils.clip_grad_norm_(self.parameters, self.config.max_grad_norm))
        if math.isfinite(norm):
            for group in self.adam.param_groups:
                group["lr"] = self.learning_rate
            self.adam.step()
            self._skipped_in_a_row = 0
        else:
            self.skipped += 1
            self._skipped_in_a_row += 1
            log.warning("gradient norm %s: step skipped (%d so far)", norm, self.skipped)
        self.steps += 1
        self.adam.zero_grad(set_to_none=True)
        if self._skipped_in_a_row >= MAX_SKIPS_IN_A_ROW:
            raise NonFiniteGradient(f"{MAX_SKIPS_IN_A_ROW} gradients in a row were not finite (the last norm: {norm})")
        return norm


def schedule(kind: str, step: int, warmup: int, total: int) -> float:
    """The factor on the learning rate at `step` (from 0): linear warm-up, then constant, linear or cosine to 0."""
    if step < warmup:
        return (step + 1) / warmup
    if kind == "constant" or total <= warmup:
        return 1.0
    left = max(0.0, 1.0 - (step - warmup) / (total - warmup))
    return left if kind == "linear" else 0.5 * (1.0 - math.cos(math.pi * left))
