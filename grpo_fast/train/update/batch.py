"""From completions to packed micro-batches: every token is known before the first forward pass."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor

from grpo_fast.attention import plan_packs, plan_trees, tree_tokens, trunk_tokens
from grpo_fast.rollout import Rollout
from grpo_fast.train.ranks import distributed
from grpo_fast.train.ranks.rollouts import balanced
from grpo_fast.train.update.micro_batch import MicroBatch, samples_of


class Totals(NamedTuple):
    """The counts that divide the losses of an optimizer step, of all ranks together."""

    items: int  # tokens that count
    completions: int
    micro_batches: int
    trunk_tokens: int

    @classmethod
    def of(cls, minibatch: Sequence[MicroBatch]) -> Totals:
        items = max(1, sum(batch.active_tokens for batch in minibatch))
        trunk = sum(batch.trunk_tokens for batch in minibatch)
        return cls(items, sum(map(len, minibatch)), len(minibatch), trunk)


# Tensors of the tokens that `precompute` makes once and all updates on the batch read.
FIXED = (
    "old_logps", "ref_logps", "ref_hidden", "teacher", "old_values", "returns", "token_advantages",
)  # fmt: skip


class StepBatch:
    """The completions of one step in micro-batches of at most `budget` trunk tokens.

    `minibatches[k]` are the micro-batches of one optimizer step; a completion that exceeds the
    budget gets one of its own. Of several ranks each has a share of every minibatch, whole groups,
    with about as many tokens as the others', and idle micro-batches until all have equally many.
    `totals[k]` are those of all ranks, and so is what `of_each` gives.

    Args:
        rollout: N·G completions, the G of a prompt side by side.
        advantages: (N·G,).
        minibatches: optimizer steps per pass; it divides N·G.
        shared: the completions of a group share one copy of their prompt.
    """

    def __init__(
        self,
        rollout: Rollout,
        advantages: Tensor,
        *,
        group_size: int,
        minibatches: int,
        budget: int,
        device: torch.device | str,
        shared: bool = True,
        mask_truncated: bool = False,
        rank: int = 0,
        ranks: int = 1,
    ) -> None:
        self.rollout, self.advantages, self.group_size = rollout, advantages, group_size
        self.is_recorded = any(places is not None for places in rollout.trained)
        self.rank, self.ranks = rank, ranks
        self.device, self.shared, self.mask_truncated = device, shared, mask_truncated
        self.size, self.budget = len(rollout.completion_ids) // minibatches, budget
        self.minibatches: list[list[MicroBatch]] = []
        self.totals: list[Totals] = []
        self.has_fixed = False
        self.token_rewards: list[Tensor] | None = None  # of the completions, where they have any
        self.deal(range(len(rollout.completion_ids)))

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

    def deal(self, order: Sequence[int]) -> None:
        """Deal the completions to the minibatches in this order, with their fixed tensors."""
        hands = [order[first : first + self.size] for first in range(0, len(order), self.size)]
        self.parts = [sorted(hand) for hand in hands]  # a prompt's completions side by side
        self.pack(self.budget, keep_fixed=True)

    def shuffle(self, seed: str, by_group: bool = False) -> None:
        """Deal the completions, or whole groups, in an order that follows from the seed alone."""
        size = self.group_size if by_group else 1
        count = len(self.rollout.completion_ids)
        blocks = [range(first, first + size) for first in range(0, count, size)]
        random.Random(seed).shuffle(blocks)
        self.deal([i for block in blocks for i in block])

    def pack(self, budget: int, keep_fixed: bool = False) -> None:
        """Distribute the completions over micro-batches of at most `budget` trunk tokens.

        keep_fixed: hand the fixed tensors on, completion by completion; else forget them.
        """
        # `fixed` reads the micro-batches, so it comes before they are replaced.
        self.budget, self.has_fixed = budget, self.has_fixed and keep_fixed
        fixed = self.fixed()
        packed = [self._pack_part(part, budget) for part in self.parts]
        self.minibatches, self.totals = [list(x) for x in zip(*packed, strict=True)]
        for name, values in fixed.items():
            self.set(name, values)

    def has(self, name: str) -> bool:
        return all(getattr(batch, name) is not None for batch in self.micro_batches)

    def fixed(self) -> dict[str, list[Tensor]]:
        return {name: self.of_each(name) for name in FIXED if self.has_fixed and self.has(name)}

    def of_each(self, name: str) -> list[Tensor]:
        """The (R,) values of this name as one tensor for each completion, in their order, of all
        ranks. Collective.
        """
        values: dict[int, Tensor] = {}
        for batch in self.micro_batches:
            if not batch.is_idle:
                views = batch.packed.split(getattr(batch, name))
                values.update(zip(batch.chosen, views, strict=True))
        if self.ranks > 1:
            like = getattr(self.micro_batches[0], name)
            return distributed.exchange(values, self.rollout.lengths, like)
        return [values[i] for i in range(len(values))]

    def set(self, name: str, values: Sequence[Tensor]) -> None:
        """Hand the micro-batches values of this name: a tensor for each completion, in order."""
        for batch in self.micro_batches:
            setattr(batch, name, torch.cat([values[i] for i in batch.chosen]))

    def used_advantages(self) -> list[Tensor]:
        """The advantages of the tokens of each completion."""
        if self.has("token_advantages"):
            return self.of_each("token_advantages")
        both = zip(self.advantages, self.rollout.lengths, strict=True)
        return [advantage.repeat(length) for advantage, length in both]

    def _pack_part(self, part: Sequence[int], budget: int) -> tuple[list[MicroBatch], Totals]:
        """This rank's micro-batches of a minibatch, and the totals of all ranks'."""
        groups = [list(members) for _, members in groupby(part, key=self._group)]
        plans, trunk = [], 0
        for own in balanced([self._cost(group) for group in groups], self.ranks):
            plan = self._plan([groups[g] for g in own], budget)
            trunk += sum(self._cost(members) for chosen in plan for members in chosen)
            plans.append(plan)
        micro_batches = [self.packed(chosen) for chosen in plans[self.rank]]
        if missing := max(map(len, plans)) - len(micro_batches):
            shortest = min(part, key=lambda i: self._cost([i]))
            micro_batches += [self.packed([[shortest]]).idle()] * missing
        # The loss takes len(part)/G for the number of prompts: here it is that of those present.
        scale = len(groups) * self.group_size / len(part)
        of_prompt = {i: sum(map(self._tokens, group)) for group in groups for i in group}
        for batch in micro_batches:
            x = [of_prompt[i] * scale for i in batch.chosen]
            batch.prompt_items = torch.tensor(x, dtype=torch.float64, device=self.device)
        items = sum(map(self._tokens, part))
        return micro_batches, Totals(max(1, items), len(part), sum(map(len, plans)), trunk)

    def packed(self, chosen: list[list[int]]) -> MicroBatch:
        options: Any = {"shared": self.shared, "mask_truncated": self.mask_truncated}
        return MicroBatch.pack(self.rollout, self.advantages, chosen, self.device, **options)

    def _plan(self, groups: list[list[int]], budget: int) -> list[list[list[int]]]:
        if self.is_recorded:
            every = [i for group in groups for i in group]
            rows = plan_trees(samples_of(self.rollout, every), budget)
            return [[[every[n] for n in row]] for row in rows]
        packs = plan_packs([self._lengths(g) for g in groups], budget, shared=self.shared)
        return [[[groups[s.group][i] for i in s.completions] for s in pack] for pack in packs]

    def _group(self, i: int) -> Any:
        return self.rollout.prompts[i] if self.is_recorded else i // self.group_size

    def _lengths(self, group: Sequence[int]) -> tuple[int, list[int]]:
        prompts, completions = self.rollout.prompt_ids, self.rollout.completion_ids
        return len(prompts[group[0]]), [len(completions[i]) for i in group]

    def _cost(self, group: Sequence[int]) -> int:
        if self.is_recorded:
            return tree_tokens(samples_of(self.rollout, group))
        return trunk_tokens(*self._lengths(group), shared=self.shared)

    def _tokens(self, i: int) -> int:
        """The tokens of a completion that count, as in `MicroBatch.pack`."""
        cut = self.mask_truncated and self.rollout.truncated[i]
        counts = not cut and not bool(self.advantages[i].isnan())
        return len(self.rollout.completion_ids[i]) if counts else 0
