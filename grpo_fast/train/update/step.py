"""One step of a run: its packed batch and the updates made so far."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from grpo_fast.train.collect.groups import PromptRecord
from grpo_fast.train.metrics.clock import Clock
from grpo_fast.train.metrics.losses import LossMetrics, finite
from grpo_fast.train.update.batch import StepBatch


@dataclass
class Update:
    """One optimizer update: its losses, the norm of its gradient, its learning rate."""

    losses: LossMetrics
    norm: float
    rate: float


def merge_losses(updates: Sequence[Update], per_pass: int) -> LossMetrics:
    """Merge the losses of several updates; the logps are those of the first pass."""
    seen = LossMetrics(optimizer_steps=len(updates))
    for index, each in enumerate(updates):
        seen.parts += each.losses.parts
        if index < per_pass:
            seen.logps += each.losses.logps
    return seen


def update_rows(updates: Sequence[Update], first: int) -> list[dict[str, float]]:
    """Return a row of metrics for each update: its losses, `grad_norm`, `learning_rate`, `update`.

    Args:
        first: number of the first update in the run, counted from 1.
    """
    return [
        finite({"update": float(first + index), **each.losses.result(), "grad_norm": each.norm,
                "learning_rate": each.rate})
        for index, each in enumerate(updates)
    ]  # fmt: skip


@dataclass
class Step:
    """One step of a run. It lives in memory only: a run resumes at the end of a step."""

    number: int
    clock: Clock
    batch: StepBatch
    metrics: dict[str, float]  # of what was sampled
    records: list[PromptRecord]
    updates: list[Update] = field(default_factory=list)
