"""Order of the prompts of a run, and records of their groups of samples."""

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

    A place is an index into this endless sequence, and also the number of the prompt's group.

    Args:
        examples: the training set.
        consumed: the next place.
    """

    def __init__(self, examples: Sequence[Example], consumed: int = 0) -> None:
        self.examples = examples
        self.consumed = consumed

    def next(self, count: int) -> range:
        """Return the next places without consuming them."""
        return range(self.consumed, self.consumed + count)

    def take(self, count: int) -> range:
        """Return and consume the next places."""
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
    """Line of prompts.jsonl about a prompt that was sampled, and the use of its group."""

    step: Count
    prompt: Count  # index in the training set
    reward: float | None  # mean over the samples with a reward; None if no sample has one
    reward_std: float | None
    use: Use


def uses_of(judged: Tensor, wanted: int) -> list[Use]:
    """Decide which groups a step uses.

    Groups with different rewards are kept. If they are too few, other groups are filled in, and the
    rest is dropped.

    Args:
        judged: rewards of shape (groups, G). Samples without a reward are NaN and are ignored.
        wanted: number of groups that the step uses.
    """
    # A group without any reward gets the lowest value +inf and the highest value -inf: no spread.
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
        numbers: index in the training set of each group's prompt.
        judged: rewards of shape (groups, G).
        uses: use of each group.
        step: number of the step.
    """
    records = []
    for number, group, use in zip(numbers, judged.double(), uses, strict=True):
        rewards = group[~group.isnan()]
        mean = float(rewards.mean()) if len(rewards) else None
        spread = float(spread_of(rewards)) if len(rewards) else None
        records.append(PromptRecord(step, number, mean, spread, use))
    return records
