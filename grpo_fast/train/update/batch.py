"""The samples of a step, packed into micro-batches.

The micro-batches of a step are planned before its first forward pass.
"""

from __future__ import annotations

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

# Columns of Samples that `precompute` fills once per step. All updates of the step use them.
FIXED = (
    "old_logps", "ref_logps", "ref_hidden", "teacher", "values", "returns", "token_advantages",
)  # fmt: skip


class Totals(NamedTuple):
    """Counts of one optimizer step, summed over all ranks. They normalize the step's losses."""

    items: int  # tokens that contribute to the loss
    completions: int
    micro_batches: int
    trunk_tokens: int

    @classmethod
    def of(cls, minibatch: Sequence[MicroBatch]) -> Totals:
        items = max(1, sum(batch.active_tokens for batch in minibatch))
        trunk = sum(batch.trunk_tokens for batch in minibatch)
        return cls(items, sum(map(len, minibatch)), len(minibatch), trunk)


class StepBatch:
    """The samples of one step, packed into micro-batches of limited size.

    `minibatches[k]` contains this rank's micro-batches of optimizer step k. `totals[k]` contains
    the counts of optimizer step k over all ranks. A sample that exceeds the token budget gets a
    micro-batch that contains only this sample.

    The groups of every minibatch are divided among the ranks, so that all ranks have about the same
    number of tokens. A rank with too few micro-batches gets idle micro-batches, because all ranks
    must run the same number of passes.

    Args:
        samples: samples with advantages. The samples of a group are adjacent.
        group_size: samples per group (G).
        minibatches: optimizer steps per pass, a divisor of the number of samples.
        budget: maximum number of trunk tokens of a micro-batch.
        device: device of the packed tensors.
        shared: if True, store the prompt of a group only once in a micro-batch.
        trees: if True, store equal prefixes of any samples only once, as recorded rollouts need.
        mask_truncated: if True, exclude samples without an EOS from the loss.
        rank: number of this rank.
        ranks: number of ranks.
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
        self.samples = samples.on(device)
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
        # A NaN advantage marks a sample without a reward, which does not contribute to the loss.
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
        """Number of tokens that one pass sends through the trunk, on all ranks together."""
        return sum(each.trunk_tokens for each in self.totals)

    @property
    def largest(self) -> int:
        """Number of trunk tokens in this rank's largest micro-batch."""
        return max(batch.trunk_tokens for batch in self.micro_batches)

    @property
    def completion_mask(self) -> Tensor:
        """Mask of the completion tokens that contribute to the loss, bool (R,) on the CPU."""
        lengths = torch.tensor(self.samples.lengths)
        return self.counts.repeat_interleave(lengths)

    def deal(self, order: Sequence[int]) -> None:
        """Distribute the samples over the minibatches in the given order, and pack them."""
        parts = [order[first : first + self.size] for first in range(0, len(order), self.size)]
        # Sort the samples of each minibatch, so that samples with the same prompt are adjacent and
        # can share the prompt.
        self.parts = [sorted(part) for part in parts]
        self.pack(self.budget)

    def shuffle(self, seed: str, by_group: bool = False) -> None:
        """Distribute the samples over the minibatches in a random order, and pack them.

        Args:
            seed: seed of the order.
            by_group: if True, keep the samples of each group together.
        """
        size = self.group_size if by_group else 1
        blocks = [range(at, at + size) for at in range(0, len(self.samples), size)]
        random.Random(seed).shuffle(blocks)
        self.deal([i for block in blocks for i in block])

    def pack(self, budget: int) -> None:
        """Distribute the samples over micro-batches and pack them. All ranks must call this.

        The columns in `FIXED` keep their values if `precompute` has already computed them.

        Args:
            budget: maximum number of trunk tokens of a micro-batch.
        """
        self.budget = budget
        if self.has_fixed:
            # Packing can move a sample to a different rank, which then needs the columns of the
            # sample.
            self.exchange(FIXED)
        packed = [self._pack_part(part, budget) for part in self.parts]
        self.minibatches = [micro_batches for micro_batches, _ in packed]
        self.totals = [totals for _, totals in packed]

    def exchange(self, names: Sequence[str]) -> None:
        """Copy the named columns' values of all ranks to every rank. All ranks must call this."""
        if self.ranks == 1:
            return
        # Gather the values with a sum over the ranks. Each value comes from one rank, and all other
        # ranks contribute 0, so the sum is exact. Begin the list of rows with an empty tensor,
        # because all micro-batches of a rank can be idle and `cat` fails without an input.
        own = torch.zeros(0, dtype=torch.int64, device=self.device)
        own = torch.cat([own, *(x.rows for x in self.micro_batches if not x.is_idle)])
        for name in names:
            column = getattr(self.samples, name)
            if column is not None:
                # Convert the column to at least fp32. gloo can add neither bools nor bf16.
                dtype = torch.promote_types(column.dtype, torch.float32)
                every = torch.zeros_like(column, dtype=dtype)
                every[own] = column[own].to(dtype)
                setattr(self.samples, name, sum_(every).to(column.dtype))

    def used_advantages(self) -> tuple[Tensor, ...]:
        """Return one tensor of token advantages per sample. All ranks must call this."""
        lengths = self.samples.lengths
        if self.samples.token_advantages is not None:
            self.exchange(["token_advantages"])
            return self.samples.token_advantages.split(lengths)
        return self.advantages.repeat_interleave(torch.tensor(lengths)).split(lengths)

    def packed(self, groups: Sequence[Sequence[int]]) -> MicroBatch:
        """Pack samples into one micro-batch. Each group is a list of sample indices."""
        options: Any = {"shared": self.shared, "trees": self.trees}
        return MicroBatch.pack(self.samples, groups, self.counts, self.device, **options)

    def _pack_part(self, part: Sequence[int], budget: int) -> tuple[list[MicroBatch], Totals]:
        """Pack a minibatch. Return this rank's micro-batches, and the totals over all ranks."""
        # 1. Assign complete groups to the ranks, and plan the micro-batches of each rank.
        group_of = self.samples.group.tolist()
        groups = [list(members) for _, members in groupby(part, key=group_of.__getitem__)]
        plans = []
        trunk = 0
        for own in balanced([self._cost(group) for group in groups], self.ranks):
            plan = self._plan([groups[g] for g in own], budget)
            trunk += sum(self._cost(members) for chosen in plan for members in chosen)
            plans.append(plan)
        # 2. Pack this rank's micro-batches. FSDP gathers weights in every pass, so all ranks must
        # run the same number of passes. Add idle micro-batches where passes are missing.
        micro_batches = [self.packed(chosen) for chosen in plans[self.rank]]
        missing = max(map(len, plans)) - len(micro_batches)
        if missing:
            shortest = min(part, key=lambda i: self._cost([i]))
            micro_batches += [self.packed([[shortest]]).idle()] * missing
        # 3. Count the tokens that contribute to the loss. The aggregation `prompt_mean` assumes
        # len(part) / G prompts. A shuffled minibatch can have completions of more prompts than
        # that, so multiply its divisors by the ratio of the two numbers.
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
        """Plan micro-batches of at most `budget` tokens.

        Returns:
            A list of micro-batches. A micro-batch is a list of groups, and a group is a list of
            sample indices.
        """
        if self.trees:
            every = [i for group in groups for i in group]
            rows = plan_trees([self.samples.sample(i) for i in every], budget)
            return [[[every[n] for n in row]] for row in rows]
        packs = plan_packs([self._lengths(g) for g in groups], budget, shared=self.shared)
        return [[[groups[s.group][i] for i in s.completions] for s in pack] for pack in packs]

    def _lengths(self, group: Sequence[int]) -> tuple[int, list[int]]:
        return self.samples.prompt_lengths[group[0]], [self.samples.lengths[i] for i in group]

    def _cost(self, group: Sequence[int]) -> int:
        """Return the number of trunk tokens of a group."""
        if self.trees:
            return tree_tokens([self.samples.sample(i) for i in group])
        return trunk_tokens(*self._lengths(group), shared=self.shared)


def balanced(costs: Sequence[int], ranks: int) -> list[list[int]]:
    """Assign items to ranks so that the sums of their costs are similar.

    Args:
        costs: cost of each item.
        ranks: number of ranks.

    Returns:
        For each rank, the sorted indices of its items.
    """
    # Every rank must compute the same assignment. It does, because `sorted` is stable and `min`
    # returns the first minimum.
    assigned: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for item in sorted(range(len(costs)), key=lambda i: -costs[i]):
        least = min(range(ranks), key=loads.__getitem__)
        assigned[least].append(item)
        loads[least] += costs[item]
    return [sorted(items) for items in assigned]
