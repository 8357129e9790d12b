"""Data of one training step: its packed batch, its metrics and the updates so far."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from grpo_fast.train.metrics.clock import Clock
from grpo_fast.train.metrics.losses import LossMetrics
from grpo_fast.train.update.batch import StepBatch


@dataclass
class Update:
    """Losses, gradient norm and learning rate of one optimizer update."""

    losses: LossMetrics
    norm: float
    rate: float


def merge_losses(updates: Sequence[Update], per_pass: int) -> LossMetrics:
    """Merge the losses of several updates of one step.

    Args:
        updates: the updates of the step.
        per_pass: updates per pass over the batch. The result contains only the log-probs of the
            first pass.
    """
    seen = LossMetrics(optimizer_steps=len(updates))
    for index, each in enumerate(updates):
        seen.parts += each.losses.parts
        if index < per_pass:
            seen.logps += each.losses.logps
    return seen


@dataclass
class Step:
    """Samples, metrics and updates of one training step."""

    number: int
    clock: Clock
    batch: StepBatch
    metrics: dict[str, float]  # metrics of the samples
    updates: list[Update] = field(default_factory=list)
