"""Which prompts a run asks; groups of scored completions, judged by the spread of their rewards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from grpo_fast.data import Example
from grpo_fast.rewards import RewardResult
from grpo_fast.rollout import Rollout
from grpo_fast.train.config.base import Count
from grpo_fast.train.metrics.samples import spread_of

Use = Literal["kept", "filled", "dropped"]


class Asked(NamedTuple):
    number: int
    example: Example


class PromptQueue:
    """The training set in its order, round and round. `consumed` alone says where it stands."""

    def __init__(self, examples: Sequence[Example], consumed: int = 0) -> None:
        self.examples, self.consumed = examples, consumed

    def next(self, count: int) -> list[Asked]:
        places = range(self.consumed, self.consumed + count)
        numbers = [place % len(self.examples) for place in places]
        return [Asked(number, self.examples[number]) for number in numbers]

    def take(self, count: int) -> list[Asked]:
        asked = self.next(count)
        self.consumed += count
        return asked


@dataclass
class PromptRecord:
    """A line of prompts.jsonl: a prompt that was asked, and what became of its group."""

    step: Count
    prompt: Count  # its place in the training set
    reward: float | None  # the mean of the samples that have one; None: no sample has any
    reward_std: float | None
    use: Use


class Drawn(NamedTuple):
    """Scored completions of some prompts, the G of each side by side."""

    asked: list[Asked]  # of each group
    rollout: Rollout
    scores: RewardResult

    def concat(self, other: Drawn) -> Drawn:
        theirs = vars(other.rollout)
        lists = {name: values + theirs[name] for name, values in vars(self.rollout).items()}
        a, b = self.scores, other.scores
        scores = RewardResult(
            torch.cat([a.total, b.total]),
            {name: torch.cat([values, b.per_fn[name]]) for name, values in a.per_fn.items()},
            {name: why + b.reasons[name] for name, why in a.reasons.items()},
            self._per_token() + other._per_token() if a.per_token or b.per_token else None,
        )
        return Drawn(self.asked + other.asked, Rollout(**lists), scores)

    def select(self, groups: Sequence[int]) -> Drawn:
        """The chosen groups; the reasons of lost samples, counted over all groups, are left out."""
        size = len(self.scores.total) // len(self.asked)
        places = [group * size + i for group in groups for i in range(size)]
        lists = {name: [x[i] for i in places] for name, x in vars(self.rollout).items()}
        scores = RewardResult(
            self.scores.total[places],
            {name: values[places] for name, values in self.scores.per_fn.items()},
            {name: Counter() for name in self.scores.reasons},
            [self._per_token()[i] for i in places] if self.scores.per_token else None,
        )
        return Drawn([self.asked[i] for i in groups], Rollout(**lists), scores)

    def _per_token(self) -> list[Tensor]:
        """The rewards of every token; where no function gave any, all of it at the last one."""
        if self.scores.per_token is not None:
            return self.scores.per_token
        pairs = zip(self.scores.total, self.rollout.lengths, strict=True)
        return [torch.cat([total.new_zeros(max(n - 1, 0)), total[None][:n]]) for total, n in pairs]

    def judged(self, name: str | None) -> Tensor:  # (groups, G)
        values = self.scores.total if name is None else self.scores.per_fn[name]
        return values.view(len(self.asked), -1)


def uses_of(judged: Tensor, wanted: int) -> list[Use]:
    """The use of each group: kept where its rewards differ, else filled in or dropped.

    `wanted` groups are kept or filled in; lost samples (NaN) make no spread.
    """
    # A NaN loses every comparison, so that a group of nothing else has its low above its high.
    low = judged.nan_to_num(nan=torch.inf).amin(1)
    spread = (judged.nan_to_num(nan=-torch.inf).amax(1) > low).tolist()
    missing = wanted - sum(spread)
    uses: list[Use] = []
    for has_spread in spread:
        uses.append("kept" if has_spread else "filled" if missing > 0 else "dropped")
        missing -= uses[-1] == "filled"
    return uses


def difficulties(
    asked: Sequence[Asked], judged: Tensor, uses: Sequence[Use], step: int
) -> list[PromptRecord]:
    records = []
    for one, group, use in zip(asked, judged.double(), uses, strict=True):
        rewards = group[~group.isnan()]
        mean, spread = None, None
        if len(rewards):
            mean, spread = float(rewards.mean()), float(spread_of(rewards))
        records.append(PromptRecord(step, one.number, mean, spread, use))
    return records
