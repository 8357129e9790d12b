"""The samples of a step in packed micro-batches, planned before the first forward pass."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor

from grpo_fast.attention import plan_packs, plan_trees, tree_tokens, trunk_tokens
from grpo_fast.rollout import Samples
from grpo_fast.train.ranks.distributed import sum_
from grpo_fast.train.update.micro_batch import MicroBatch

# Columns that `precompute` computes once per step and every update reads.
FIXED = (
    "old_logps", "ref_logps", "ref_hidden", "teacher", "values", "returns", "token_advantages",
)  # fmt: skip


class Totals(NamedTuple):
    """The counts that divide the losses of an optimizer step, over all ranks."""

    items: int  # tokens that count
    completions: int
    micro_batches: int
    trunk_tokens: int

    @classmethod
    def of(cls, minibatch: Sequence[MicroBatch]) -> Totals:
        items = max(1, sum(batch.active_tokens for batch in minibatch))
        trunk = sum(batch.trunk_tokens for batch in minibatch)
        return cls(items, sum(map(len, minibatch)), len(minibatch), trunk)


class StepBatch:
    """The samples of one step in micro-batches of at most `budget` trunk tokens.

    `minibatches[k]` are the micro-batches of one optimizer step; a sample that exceeds the budget
    gets one alone. With several ranks each has a share of every minibatch: whole groups with about
    as many tokens as the other ranks', and idle micro-batches until all ranks have equally many.
    `totals[k]` count over all ranks.

    Args:
        samples: with `advantages`, the samples of a group next to each other.
        minibatches: optimizer steps per pass; it divides the number of samples.
        shared: the samples of a group share one copy of their prompt.
        trees: the samples are recorded ones, whose equal prefixes share rows.
    """

    def __init__(
        self,
        samples: Samples,
        *,
        group_size: int,
        minibatches: int,
        budget: int,
        device: torch.device | str,
        shared: bool = True,
        trees: bool = False,
        mask_truncated: bool = False,
        rank: int = 0,
        ranks: int = 1,
    ) -> None:
        self.given = samples.on(device)  # without what `precompute` adds
        self.samples = dataclasses.replace(self.given)
        self.group_size = group_size
        self.rank = rank
        self.ranks = ranks
        self.device = device
        self.shared = shared
        self.trees = trees
        self.size = len(samples) // minibatches
        self.budget = budget
        self.mask_truncated = mask_truncated
        self.advantages = samples.advantages
        # A NaN marks a sample without a verdict.
        self.counts = ~(samples.truncated & mask_truncated | self.advantages.isnan())
        self.has_fixed = False
        self.parts: list[list[int]] = []
        self.minibatches: list[list[MicroBatch]] = []
        self.totals: list[Totals] = []
        self.deal(range(len(samples)))

    @property
    def micro_batches(self) -> list[MicroBatch]:
        return [batch for minibatch in self.minibatches for batch in minibatch]

    @property
    def trunk_tokens(self) -> int:
        """Tokens that one pass over the batch sends through the trunk, on all ranks."""
        return sum(each.trunk_tokens for each in self.totals)

    @property
    def largest(self) -> int:
        return max(batch.trunk_tokens for batch in self.micro_batches)

    @property
    def completion_mask(self) -> Tensor:
        """(R,) bool on the host: the token counts."""
        lengths = torch.tensor(self.samples.lengths)
        return self.counts.repeat_interleave(lengths)

    def deal(self, order: Sequence[int]) -> None:
        """Deal the samples to the minibatches in this order."""
        hands = [order[first : first + self.size] for first in range(0, len(order), self.size)]
        self.parts = [sorted(hand) for hand in hands]  # a prompt's samples next to each other
        self.pack(self.budget, keep_fixed=True)

    def shuffle(self, seed: str, by_group: bool = False) -> None:
        """Deal the samples, or whole groups, in an order that follows from the seed alone."""
        size = self.group_size if by_group else 1
        blocks = [range(at, at + size) for at in range(0, len(self.samples), size)]
        random.Random(seed).shuffle(blocks)
        self.deal([i for block in blocks for i in block])

    def pack(self, budget: int, keep_fixed: bool = False) -> None:
        """Distribute the samples over micro-batches of at most `budget` trunk tokens. Collective.

        keep_fixed: keep what `precompute` computed; otherwise forget it.
        """
        self.budget = budget
        if keep_fixed:
            self.exchange(FIXED)  # a sample may go to another rank
        else:
            self.samples = dataclasses.replace(self.given)
            self.has_fixed = False
        packed = [self._pack_part(part, budget) for part in self.parts]
        self.minibatches = [micro_batches for micro_batches, _ in packed]
        self.totals = [totals for _, totals in packed]

    def exchange(self, names: Sequence[str]) -> None:
        """Give every rank the columns of all ranks' samples. Collective.

        The sum of a rank's values and the zeros of the other ranks has the bits of the values.
        """
        if self.ranks == 1:
            return
        own = torch.zeros(0, dtype=torch.int64, device=self.device)  # all may be idle
        own = torch.cat([own, *(x.rows for x in self.micro_batches if not x.is_idle)])
        for name in names:
            column = getattr(self.samples, name)
            if column is not None:
                # gloo adds neither bools nor bf16.
                dtype = torch.promote_types(column.dtype, torch.float32)
                every = torch.zeros_like(column, dtype=dtype)
                every[own] = column[own].to(dtype)
                setattr(self.samples, name, sum_(every).to(column.dtype))

    def used_advantages(self) -> tuple[Tensor, ...]:
        """Return the advantages of the completion tokens of each sample. Collective."""
        lengths = self.samples.lengths
        if self.samples.token_advantages is not None:
            self.exchange(["token_advantages"])
            return self.samples.token_advantages.split(lengths)
        return self.advantages.repeat_interleave(torch.tensor(lengths)).split(lengths)

    def packed(self, groups: Sequence[Sequence[int]]) -> MicroBatch:
        options: Any = {"shared": self.shared, "trees": self.trees}
        return MicroBatch.pack(self.samples, groups, self.counts, self.device, **options)

    def _pack_part(self, part: Sequence[int], budget: int) -> tuple[list[MicroBatch], Totals]:
        """Return this rank's micro-batches of a minibatch, and the totals of all ranks."""
        # 1. Deal whole groups to the ranks, and plan the micro-batches of each.
        group_of = self.samples.group.tolist()
        groups = [list(members) for _, members in groupby(part, key=group_of.__getitem__)]
        plans = []
        trunk = 0
        for own in balanced([self._cost(group) for group in groups], self.ranks):
            plan = self._plan([groups[g] for g in own], budget)
            trunk += sum(self._cost(members) for chosen in plan for members in chosen)
            plans.append(plan)
        # 2. Pack this rank's; add idle ones up to the number of the rank that has the most.
        micro_batches = [self.packed(chosen) for chosen in plans[self.rank]]
        missing = max(map(len, plans)) - len(micro_batches)
        if missing:
            shortest = min(part, key=lambda i: self._cost([i]))
            micro_batches += [self.packed([[shortest]]).idle()] * missing
        # 3. Count. The loss takes len(part)/G as the number of prompts: scale to those present.
        tokens = [n if counts else 0 for n, counts in
                  zip(self.samples.lengths, self.counts.tolist(), strict=True)]  # fmt: skip
        scale = len(groups) * self.group_size / len(part)
        of_prompt = {i: sum(tokens[j] for j in group) for group in groups for i in group}
        for batch in micro_batches:
            items = [of_prompt[i] * scale for i in batch.chosen]
            batch.prompt_items = torch.tensor(items, dtype=torch.float64, device=self.device)
        total = max(1, sum(tokens[i] for i in part))
        return micro_batches, Totals(total, len(part), sum(map(len, plans)), trunk)

    def _plan(self, groups: list[list[int]], budget: int) -> list[list[list[int]]]:
        if self.trees:
            every = [i for group in groups for i in group]
            rows = plan_trees([self.samples.sample(i) for i in every], budget)
            return [[[every[n] for n in row]] for row in rows]
        packs = plan_packs([self._lengths(g) for g in groups], budget, shared=self.shared)
        return [[[groups[s.group][i] for i in s.completions] for s in pack] for pack in packs]

    def _lengths(self, group: Sequence[int]) -> tuple[int, list[int]]:
        return self.samples.prompt_lengths[group[0]], [self.samples.lengths[i] for i in group]

    def _cost(self, group: Sequence[int]) -> int:
        if self.trees:
            return tree_tokens([self.samples.sample(i) for i in group])
        return trunk_tokens(*self._lengths(group), shared=self.shared)


def balanced(costs: Sequence[int], ranks: int) -> list[list[int]]:
    """Deal numbers to the ranks, the costliest first, each to the rank with the least so far."""
    # All ranks compute this alone and must agree: of equal costs, and of equal loads, the first.
    hands: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for number in sorted(range(len(costs)), key=lambda i: -costs[i]):
        least = min(range(ranks), key=loads.__getitem__)
        hands[least].append(number)
        loads[least] += costs[number]
    return [sorted(hand) for hand in hands]
