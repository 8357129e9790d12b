"""The prompts of a run in their order, and what became of the group of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from grpo_fast.data import Example
from grpo_fast.train.config.base import Count
from grpo_fast.train.metrics.samples import spread_of

Use = Literal["kept", "filled", "dropped"]


class PromptQueue:
    """The training set in its order, repeated without end.

    A place in this sequence is also the number of the prompt's group. `consumed` is the next place.
    """

    def __init__(self, examples: Sequence[Example], consumed: int = 0) -> None:
        self.examples = examples
        self.consumed = consumed

    def next(self, count: int) -> range:
        """Return the next `count` places; the queue stays where it is."""
        return range(self.consumed, self.consumed + count)

    def take(self, count: int) -> range:
        places = self.next(count)
        self.consumed = places.stop
        return places

    def number(self, place: int) -> int:
        """Return the index in the training set of the prompt at a place."""
        return place % len(self.examples)

    def example(self, place: int) -> Example:
        return self.examples[self.number(place)]


@dataclass
class PromptRecord:
    """A line of prompts.jsonl: a prompt that was sampled, and what became of its group."""

    step: Count
    prompt: Count  # its index in the training set
    reward: float | None  # mean of the samples that have a reward; None: no sample has one
    reward_std: float | None
    use: Use


def uses_of(judged: Tensor, wanted: int) -> list[Use]:
    """Return the use of each group: kept if its rewards differ, else filled in or dropped.

    `wanted` groups are kept or filled in; lost samples (NaN) make no spread.
    """
    # Every comparison with NaN is false: a group of NaNs has its low above its high.
    low = judged.nan_to_num(nan=torch.inf).amin(1)
    spread = (judged.nan_to_num(nan=-torch.inf).amax(1) > low).tolist()
    missing = wanted - sum(spread)
    uses: list[Use] = []
    for has_spread in spread:
        if has_spread:
            uses.append("kept")
        elif missing > 0:
            uses.append("filled")
            missing -= 1
        else:
            uses.append("dropped")
    return uses


def records_of(
    numbers: Sequence[int], judged: Tensor, uses: Sequence[Use], step: int
) -> list[PromptRecord]:
    """Return a record for each group.

    Args:
        numbers: the index in the training set of each group's prompt.
        judged: (groups, G) rewards.
    """
    records = []
    for number, group, use in zip(numbers, judged.double(), uses, strict=True):
        rewards = group[~group.isnan()]
        mean = float(rewards.mean()) if len(rewards) else None
        spread = float(spread_of(rewards)) if len(rewards) else None
        records.append(PromptRecord(step, number, mean, spread, use))
    return records
