"""One step of a run, which is also what a checkpoint has of it between two updates."""

from __future__ import annotations

import dataclasses
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


@dataclass
class Updates:
    """The updates of a step.

    Args:
        per_pass: optimizer updates of one pass over the batch.
        first: the number of the first update, from 1, in the whole run.
    """

    per_pass: Count
    first: Count
    made: list[Update] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.made)

    @property
    def passes(self) -> float:
        return len(self) / self.per_pass

    def merged(self, latest: int = 0) -> LossMetrics:
        """The losses of the latest updates, or of all, as one; the logps are those of a pass."""
        seen = LossMetrics()
        for index, each in enumerate(self.made[-latest:]):
            seen.extend(each.losses, with_logps=index < self.per_pass)
        return seen

    def last_pass(self, name: str) -> float:
        """The mean of a metric over the tokens of the whole latest pass (one sync)."""
        return self.merged(self.per_pass).mean(name)

    def rows(self) -> list[dict[str, float]]:
        """A row of metrics for each update: its loss's, `grad_norm`, `learning_rate`, `update`."""
        return [
            finite({"update": float(self.first + index), **each.losses.result(),
                    "grad_norm": each.norm, "learning_rate": each.rate})
            for index, each in enumerate(self.made)
        ]  # fmt: skip


@dataclass
class Step:
    """One step of a run: its completions, the updates made so far, the metrics.

    The next update is that of minibatch `minibatch` in pass `epoch`; `metrics` are there when all
    updates are made. `packing` is, in a checkpoint, the state of `batch`.
    """

    number: Count
    updates: Updates
    clock: Clock = field(default_factory=Clock)
    collected: Collected | None = None
    packing: Packing | None = None
    noise: dict[str, float] | None = None
    epoch: Count = 0
    minibatch: Count = 0
    metrics: dict[str, float] | None = None
    update_rows: list[dict[str, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.batch: StepBatch | None = None  # packed again on resume: no field

    @property
    def place(self) -> int:
        """1 after the rollout, one more with each update, and one more at the end; 0 before."""
        if self.collected is None:
            return 0
        return 1 + len(self.updates) + (self.metrics is not None)

    def stored(self) -> Step:
        """The step for a checkpoint. Collective: each rank has a part of the batch."""
        assert self.batch is not None
        return dataclasses.replace(self, packing=self.batch.state_dict())
