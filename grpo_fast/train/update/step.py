"""Record of one training step, with its packed batch and the updates made so far."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from grpo_fast.train.collect.groups import PromptRecord
from grpo_fast.train.metrics.clock import Clock
from grpo_fast.train.metrics.losses import LossMetrics, finite
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
        per_pass: updates per pass. Log-probabilities are included from the first pass only.
    """
    seen = LossMetrics(optimizer_steps=len(updates))
    for index, each in enumerate(updates):
        seen.parts += each.losses.parts
        if index < per_pass:
            seen.logps += each.losses.logps
    return seen


def update_rows(updates: Sequence[Update], first: int) -> list[dict[str, float]]:
    """Return a row of metrics for each update.

    Args:
        updates: the updates of a step.
        first: number of the first update in the run, counted from 1.
    """
    return [
        finite({"update": float(first + index), **each.losses.result(), "grad_norm": each.norm,
                "learning_rate": each.rate})
        for index, each in enumerate(updates)
    ]  # fmt: skip


@dataclass
class Step:
    """Data of one training step. A run resumes between steps, so checkpoints never contain it."""

    number: int
    clock: Clock
    batch: StepBatch
    metrics: dict[str, float]  # metrics of the samples
    records: list[PromptRecord]
    updates: list[Update] = field(default_factory=list)

    def exceeds(self, limit: float | None, per_pass: int) -> bool:
        """Return True if the mean KL to the sampling policy in the latest pass exceeds a limit.

        Args:
            limit: the limit. None never ends a step early.
            per_pass: number of updates per pass.
        """
        if limit is None:
            return False
        return merge_losses(self.updates[-per_pass:], per_pass).mean("approx_kl") > limit
