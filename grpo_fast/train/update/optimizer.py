"""AdamW with gradient clipping and a learning rate schedule.

Steps with a non-finite gradient are skipped.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Mapping

import torch
from torch import Tensor, nn

from grpo_fast.errors import NonFiniteGradient
from grpo_fast.train.config import OptimConfig, require
from grpo_fast.train.ranks.distributed import full_tensor, sum_gradients, together

log = logging.getLogger(__name__)

MAX_SKIPS_IN_A_ROW = 3
COUNTERS = ("steps", "skipped", "skipped_in_a_row")  # attributes that a checkpoint stores


class Optimizer:
    """AdamW with gradient clipping and a learning rate schedule.

    A step whose gradient is not finite is skipped. Three such steps in a row raise an error.

    Args:
        parameters: the parameters to train.
        config: the section `optim`.
        total_steps: optimizer steps of the run, which determine the schedule.
    """

    def __init__(
        self, parameters: list[nn.Parameter], config: OptimConfig, total_steps: int
    ) -> None:
        require(parameters, "parameters", "at least one that is trained", "none")
        self.parameters = parameters
        self.config = config
        self.total_steps = total_steps
        self.adam = torch.optim.AdamW(
            parameters, lr=config.lr, weight_decay=config.weight_decay, fused=True
        )
        self.steps = 0
        self.skipped = 0
        self.skipped_in_a_row = 0
        self.has_moved = False  # True if weights may have changed since the run was last recorded

    @property
    def learning_rate(self) -> float:
        """Learning rate of the next step."""
        config = self.config
        return config.lr * schedule(config.schedule, self.steps, config.warmup, self.total_steps)

    def step(self) -> float:
        """Apply and clear the gradients. Return their norm before clipping.

        If the norm is infinite or NaN, the step is skipped.

        Raises:
            NonFiniteGradient: three steps in a row were skipped.
        """
        sum_gradients(self.parameters)  # the norm must include all ranks
        total = nn.utils.clip_grad_norm_(self.parameters, self.config.max_grad_norm)
        norm = float(full_tensor(total))
        if math.isfinite(norm):
            for group in self.adam.param_groups:
                group["lr"] = self.learning_rate
            self.has_moved = True
            self.adam.step()
            self.skipped_in_a_row = 0
        else:
            self.skipped += 1
            self.skipped_in_a_row += 1
            log.warning("gradient norm %s: step skipped (%d so far)", norm, self.skipped)
        self.steps += 1  # the schedule counts skipped steps, too
        self.adam.zero_grad()
        if self.skipped_in_a_row >= MAX_SKIPS_IN_A_ROW:
            said = f"{MAX_SKIPS_IN_A_ROW} gradients in a row were not finite"
            # All ranks have the same norm. In `together`, the error counts as one of all ranks, so
            # that the run is saved.
            with together():
                raise NonFiniteGradient(f"{said} (the last norm: {norm})")
        return norm

    def state_dict(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in COUNTERS}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        vars(self).update({name: state[name] for name in COUNTERS})

    def moments(self, names: Mapping[Tensor, str]) -> dict[str, Tensor]:
        """Return the state tensors of Adam, keyed by name.

        The name of a tensor is the parameter's name followed by Adam's key, such as `.exp_avg`.

        Args:
            names: name of each parameter.
        """
        return {
            f"{names[parameter]}.{kind}": value
            for parameter, state in self.adam.state.items()
            for kind, value in state.items()
        }

    def make_moments(self, stored: Collection[str], names: Mapping[Tensor, str]) -> None:
        """Create Adam's moments as zeros, so that a checkpoint can be loaded into them.

        Args:
            stored: names of the tensors in the checkpoint. Parameters that never had a gradient
                have no moments in the checkpoint.
            names: name of each parameter.
        """
        trained = {name.rpartition(".")[0] for name in stored}
        self.adam.state.clear()
        for parameter in self.parameters:
            if names[parameter] in trained:
                # The fused AdamW needs the step counter on the device of the parameter.
                self.adam.state[parameter] = {
                    "step": torch.zeros((), device=parameter.device),
                    "exp_avg": torch.zeros_like(parameter, requires_grad=False),
                    "exp_avg_sq": torch.zeros_like(parameter, requires_grad=False),
                }


def schedule(kind: str, step: int, warmup: int, total: int) -> float:
    """Return the factor by which the learning rate is multiplied at a step.

    Args:
        kind: constant, linear or cosine. The last two decrease to 0 at `total`.
        step: number of the step, counted from 0.
        warmup: steps of the linear warm-up.
        total: steps of the run.
    """
    # Use step + 1, because with a factor of 0 the first step would change nothing.
    if step < warmup:
        return (step + 1) / warmup
    if kind == "constant" or total <= warmup:
        return 1.0
    rest = max(0.0, 1.0 - (step - warmup) / (total - warmup))
    return rest if kind == "linear" else 0.5 * (1.0 - math.cos(math.pi * rest))
