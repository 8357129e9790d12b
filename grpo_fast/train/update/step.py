"""One step of a run, which is also what a checkpoint has of it between two updates."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field

from grpo_fast.train.collect.collector import Collected
from grpo_fast.train.config.base import Count
from grpo_fast.train.metrics.clock import Clock
from grpo_fast.train.metrics.losses import LossMetrics, finite
from grpo_fast.train.update.batch import Packing, StepBatch


@dataclass
class Update:
    """One optimizer update: its losses, the gradient's norm, the learning rate."""

    losses: LossMetrics
    norm: float
    rate: float


def merge_losses(updates: Sequence[Update], per_pass: int) -> LossMetrics:
    """The losses of several updates as one; the logps are those of the first pass."""
    seen = LossMetrics(optimizer_steps=len(updates))
    for index, each in enumerate(updates):
        seen.parts += each.losses.parts
        if index < per_pass:
            seen.logps += each.losses.logps
    return seen


def update_rows(updates: Sequence[Update], first: int) -> list[dict[str, float]]:
    """A row of metrics for each update: its loss's, `grad_norm`, `learning_rate`, `update`.

    first: the number of the first one, from 1, in the whole run.
    """
    return [
        finite({"update": float(first + index), **each.losses.result(), "grad_norm": each.norm,
                "learning_rate": each.rate})
        for index, each in enumerate(updates)
    ]  # fmt: skip


@dataclass
class Step:
    """One step of a run: its completions, the updates made so far, the metrics.

    `metrics` are there when all updates are made. `packing` is the state of `batch`, set in a
    checkpoint alone.
    """

    number: Count
    updates: list[Update] = field(default_factory=list)
    clock: Clock = field(default_factory=Clock)
    collected: Collected | None = None
    packing: Packing | None = None
    noise: dict[str, float] | None = None
    metrics: dict[str, float] | None = None

    def __post_init__(self) -> None:
        self.batch: StepBatch | None = None  # packed again on resume: no field

    @property
    def place(self) -> int:
        """1 after the rollout, one more with each update, and one more at the end."""
        return 1 + len(self.updates) + (self.metrics is not None)

    def stored(self) -> Step:
        """The step for a checkpoint. Collective: each rank has a part of the batch."""
        assert self.batch is not None
        return dataclasses.replace(self, packing=self.batch.state_dict())
