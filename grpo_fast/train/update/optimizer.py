"""AdamW with a schedule, and a step that survives a bad gradient."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from grpo_fast.errors import NonFiniteGradient
from grpo_fast.train.config import OptimConfig, require
from grpo_fast.train.config.base import Count
from grpo_fast.train.ranks.distributed import sum_gradients, whole

log = logging.getLogger(__name__)

MAX_SKIPS_IN_A_ROW = 3


@dataclass
class OptimizerState:
    steps: Count
    skipped: Count
    skipped_in_a_row: Count


class Optimizer:
    """AdamW with clipping and a schedule. Drops gradients that are not finite; three end a run."""

    def __init__(
        self, parameters: list[nn.Parameter], config: OptimConfig, total_steps: int
    ) -> None:
        require(parameters, "parameters", "at least one that is trained", "none")
        self.parameters = parameters
        self.config = config
        self.total_steps = total_steps
        self.adam = build_adam(parameters, config)
        self.steps = 0
        self.skipped = 0
        self.skipped_in_a_row = 0
        self.last_norm = math.nan

    @property
    def learning_rate(self) -> float:
        kind = self.config.schedule
        warmup = self.config.warmup
        return self.config.lr * schedule(kind, self.steps, warmup, self.total_steps)

    def step(self) -> float:
        norm = self.apply()
        self.check()
        return norm

    def apply(self) -> float:
        """Apply and clear the gradients; return their norm (inf or NaN: the step was skipped)."""
        sum_gradients(self.parameters)  # before the clipping: the norm is that of the sum
        norm = float(whole(nn.utils.clip_grad_norm_(self.parameters, self.config.max_grad_norm)))
        if math.isfinite(norm):
            self._set_rate(self.learning_rate)
            self.adam.step()
            self.skipped_in_a_row = 0
        else:
            self.skipped += 1
            self.skipped_in_a_row += 1
            log.warning("gradient norm %s: step skipped (%d so far)", norm, self.skipped)
        self.last_norm = norm
        self.steps += 1  # skipped or not: the schedule follows the updates
        self.zero_grad()
        return norm

    def check(self) -> None:
        if self.skipped_in_a_row >= MAX_SKIPS_IN_A_ROW:
            said = f"{MAX_SKIPS_IN_A_ROW} gradients in a row were not finite"
            raise NonFiniteGradient(f"{said} (the last norm: {self.last_norm})")

    def state_dict(self) -> OptimizerState:
        return OptimizerState(self.steps, self.skipped, self.skipped_in_a_row)

    def load_state_dict(self, state: OptimizerState) -> None:
        vars(self).update(vars(state))

    def moments(self, names: Mapping[Tensor, str]) -> dict[str, Tensor]:
        """Return the moments in the optimizer, by the names of their parameters."""
        return {
            f"{names[parameter]}.{kind}": value
            for parameter, state in self.adam.state.items()
            for kind, value in state.items()
        }

    def make_moments(self, stored: Collection[str], names: Mapping[Tensor, str]) -> None:
        """Create zeros for moments of these names; a parameter that was never trained has none."""
        trained = {name.rpartition(".")[0] for name in stored}
        self.adam.state.clear()
        for parameter in self.parameters:
            if names[parameter] in trained:
                # A fused AdamW has its step on the parameter's device.
                self.adam.state[parameter] = {
                    "step": torch.zeros((), device=parameter.device),
                    "exp_avg": torch.zeros_like(parameter, requires_grad=False),
                    "exp_avg_sq": torch.zeros_like(parameter, requires_grad=False),
                }

    def zero_grad(self) -> None:
        self.adam.zero_grad(set_to_none=True)

    def _set_rate(self, rate: float) -> None:
        for group in self.adam.param_groups:  # torchao refuses another object than its tensor
            old = group["lr"]
            group["lr"] = old.fill_(rate) if isinstance(old, torch.Tensor) else rate


def build_adam(parameters: list[nn.Parameter], config: OptimConfig) -> Any:
    """Return AdamW as `config.states` says: of torch, or of torchao in 8 bits or offloaded."""
    options = config.model_dump(include={"lr", "weight_decay"})
    if config.states == "full":
        return torch.optim.AdamW(parameters, fused=True, **options)
    try:
        from torchao.optim import AdamW8bit, CPUOffloadOptimizer
    except ImportError as error:
        needed = f"{config.states} needs torchao (pip install torchao)"
        raise ValueError(f"optim.states: {needed}") from error
    if config.states == "8bit":
        return AdamW8bit(parameters, **options)
    if not torch.accelerator.is_available():
        what = "offload moves states from an accelerator to the host"
        raise ValueError(f"optim.states: {what}, here is none")
    return CPUOffloadOptimizer(parameters, torch.optim.AdamW, fused=True, **options)


def schedule(kind: str, step: int, warmup: int, total: int) -> float:
    """Return the factor of the rate at `step`: linear warm-up, then constant, linear, cosine."""
    if step < warmup:
        return (step + 1) / warmup
    if kind == "constant" or total <= warmup:
        return 1.0
    rest = max(0.0, 1.0 - (step - warmup) / (total - warmup))
    return rest if kind == "linear" else 0.5 * (1.0 - math.cos(math.pi * rest))
