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
class Updates:
    """The losses, the gradient norm and the learning rate of each update.

    Args:
        per_pass: optimizer updates of one pass over the batch.
        first: the number of the first update, from 1, in the whole run.
    """

    per_pass: Count
    first: Count
    losses: list[LossMetrics] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not len(self.losses) == len(self.norms) == len(self.rates):
            raise ValueError("updates: expected as many norms and rates as losses")

    def add(self, losses: LossMetrics, rate: float, norm: float) -> None:
        self.losses.append(losses)
        self.rates.append(rate)
        self.norms.append(norm)

    def __len__(self) -> int:
        return len(self.losses)

    @property
    def passes(self) -> float:
        return len(self) / self.per_pass

    def merged(self, losses: Sequence[LossMetrics] | None = None) -> LossMetrics:
        """The losses of all updates, or of some, as one; the logps are those of the first pass."""
        seen = LossMetrics()
        for index, each in enumerate(self.losses if losses is None else losses):
            seen.extend(each, with_logps=index < self.per_pass)
        return seen

    def last_pass(self, name: str) -> float:
        """The mean of a metric over the tokens of the whole latest pass (one sync)."""
        return self.merged(self.losses[-self.per_pass :]).mean(name)

    def rows(self) -> list[dict[str, float]]:
        """A row of metrics for each update: its loss's, `grad_norm`, `learning_rate`, `update`."""
        return [
            finite({"update": float(self.first + index), **losses.result(), "grad_norm": norm,
                    "learning_rate": rate})
            for index, (losses, norm, rate) in enumerate(
                zip(self.losses, self.norms, self.rates, strict=True)
            )
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
