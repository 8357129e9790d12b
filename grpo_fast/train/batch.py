"""The samples of a step, packed into micro-batches.

The micro-batches of a step are planned before its first forward pass.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from grpo_fast import Support
from grpo_fast.attention import PackedTree, pack_groups, plan_packs, trunk_tokens
from grpo_fast.kernels.agree import is_out_of_memory
from grpo_fast.rollout import Samples
from grpo_fast.rollout.samples import COMPLETION, PROMPT, ranges, select_support
from grpo_fast.train import ranks

# Columns of Samples that `precompute` fills once per step. All updates of the step use them.
FIXED = ("old_logps", "ref_logps", "ref_hidden", "values", "returns", "token_advantages")


class Totals(NamedTuple):
    """Counts of one optimizer step, summed over all ranks. They normalize the step's losses."""

    items: int  # tokens that contribute to the loss
    completions: int
    trunk_tokens: int


@dataclass
class MicroBatch:
    """A packed row of B samples. It has T tokens, of which R are completion tokens.

    T counts a prompt only once if several samples share it.
    """

    samples: Samples  # all samples of the step
    chosen: list[int]  # indices of the B samples
    rows: Tensor  # (R,) int64, index of each completion token in the columns of the step
    packed: PackedTree
    completion_mask: Tensor  # (R,) bool, True for tokens that contribute to the loss
    advantages: Tensor  # (B,) fp32, 0 for samples without a reward
    support: Support | None  # token ids that the sampler kept, for the R tokens
    is_idle: bool = False  # True if no token contributes to the loss, see `idle`

    def column(self, name: str) -> Tensor | None:
        """Return the values of a column of `Samples` at the completion tokens of this row.

        Returns:
            Tensor of shape (R, …), or None if the samples do not have the column.
        """
        values = getattr(self.samples, name)
        return None if values is None else values[self.rows]

    def write(self, name: str, values: Tensor) -> None:
        """Write values of shape (R, …) into a column of the step's samples."""
        self.samples.write(name, self.rows, values)

    def idle(self) -> MicroBatch:
        """Return a copy that runs the same passes, but whose tokens do not contribute to the loss.

        A rank with too few micro-batches runs such copies, because FSDP2 requires the same number
        of passes on all ranks.
        """
        nothing = torch.zeros_like(self.completion_mask)
        return dataclasses.replace(self, completion_mask=nothing, is_idle=True)

    @property
    def active_tokens(self) -> int:
        return int(self.completion_mask.sum())

    @property
    def trunk_tokens(self) -> int:
        return self.packed.layout.total

    def __len__(self) -> int:
        return len(self.chosen)


@dataclass
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
        budget: maximum number of trunk tokens of a micro-batch.
        device: device of the packed tensors.
        updates: optimizer steps per pass, a divisor of the number of samples.
        shared: if True, store the prompt of a group only once in a micro-batch.
        mask_truncated: if True, exclude samples without an EOS from the loss.
        rank: number of this rank.
        ranks: number of ranks.
    """

    samples: Samples
    budget: int
    device: torch.device | str
    updates: int = 1
    shared: bool = True
    mask_truncated: bool = False
    rank: int = 0
    ranks: int = 1

    def __post_init__(self) -> None:
        self.samples = self.samples.on(self.device)
        assert self.samples.advantages is not None
        self.advantages = self.samples.advantages
        # A NaN advantage marks a sample without a reward, which does not contribute to the loss.
        is_masked = self.samples.truncated & self.mask_truncated
        self.counts = ~(is_masked | self.advantages.isnan())
        self.prompts = self.samples.split_ids(PROMPT)
        self.completions = self.samples.split_ids(COMPLETION)
        self.has_fixed = False
        self.deal(range(len(self.samples)))

    @property
    def micro_batches(self) -> list[MicroBatch]:
        return [batch for minibatch in self.minibatches for batch in minibatch]

    @property
    def trunk_tokens(self) -> int:
        """Number of tokens that one pass sends through the trunk, on all ranks together."""
        return sum(each.trunk_tokens for each in self.totals)

    @property
    def completion_mask(self) -> Tensor:
        """Mask of the completion tokens that contribute to the loss, bool (R,) on the CPU."""
        lengths = torch.tensor(self.samples.lengths)
        return self.counts.repeat_interleave(lengths)

    def deal(self, order: Sequence[int]) -> None:
        """Distribute the samples over the minibatches in the given order, and pack them.

        The columns in `FIXED` keep their values if `precompute` has already computed them.
        """
        if self.has_fixed:
            # Packing can move a sample to a different rank, which then needs the columns of the
            # sample.
            self.exchange(FIXED)
        size = len(order) // self.updates
        # Sort the samples of each minibatch, so that samples with the same prompt are adjacent and
        # can share the prompt.
        self.parts = [sorted(order[first : first + size]) for first in range(0, len(order), size)]
        packed = [self._pack_part(part) for part in self.parts]
        self.minibatches = [micro_batches for micro_batches, _ in packed]
        self.totals = [totals for _, totals in packed]

    def shuffle(self, seed: str) -> None:
        """Distribute the samples over the minibatches in a random order, and pack them."""
        order = list(range(len(self.samples)))
        random.Random(seed).shuffle(order)
        self.deal(order)

    def exchange(self, names: Sequence[str]) -> None:
        """Copy the named columns' values of all ranks to every rank."""
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
                setattr(self.samples, name, ranks.sum_(every).to(column.dtype))

    def used_advantages(self) -> tuple[Tensor, ...]:
        """Return one tensor of token advantages per sample."""
        lengths = self.samples.lengths
        if self.samples.token_advantages is not None:
            self.exchange(["token_advantages"])
            return self.samples.token_advantages.split(lengths)
        return self.advantages.repeat_interleave(torch.tensor(lengths)).split(lengths)

    def packed(self, groups: Sequence[Sequence[int]]) -> MicroBatch:
        """Pack samples into one micro-batch. Each group is a list of sample indices."""
        samples = self.samples
        chosen = [i for group in groups for i in group]
        listed = [(self.prompts[g[0]], [self.completions[i] for i in g]) for g in groups]
        packed = pack_groups(listed, shared=self.shared, device=self.device)
        # Find the completion tokens of this micro-batch in the flat columns of the step.
        at = torch.tensor(chosen)
        rows = ranges(samples.rows, at)
        mask = self.counts[at].repeat_interleave(torch.tensor(packed.lengths))
        advantages = self.advantages[at].float().nan_to_num(nan=0.0)
        support = select_support(samples.support, rows, self.device)
        return MicroBatch(
            samples, chosen, rows.to(self.device), packed, mask.to(self.device),
            advantages.to(self.device), support,
        )  # fmt: skip

    def _pack_part(self, part: Sequence[int]) -> tuple[list[MicroBatch], Totals]:
        """Pack a minibatch. Return this rank's micro-batches, and the totals over all ranks."""
        # 1. Assign complete groups to the ranks, and plan the micro-batches of each rank.
        group_of = self.samples.group.tolist()
        groups = [list(members) for _, members in groupby(part, key=group_of.__getitem__)]
        shares = balanced([self._cost(group) for group in groups], self.ranks)
        plans = [self._plan([groups[g] for g in own]) for own in shares]
        trunk = sum(self._cost(members) for plan in plans for chosen in plan for members in chosen)
        # 2. Pack this rank's micro-batches. FSDP gathers weights in every pass, so all ranks must
        # run the same number of passes. Add idle micro-batches where passes are missing.
        micro_batches = [self.packed(chosen) for chosen in plans[self.rank]]
        missing = max(map(len, plans)) - len(micro_batches)
        if missing:
            shortest = min(part, key=lambda i: self._cost([i]))
            micro_batches += [self.packed([[shortest]]).idle()] * missing
        # 3. Count the tokens that contribute to the loss.
        tokens = (torch.tensor(self.samples.lengths) * self.counts).tolist()
        total = max(1, sum(tokens[i] for i in part))
        return micro_batches, Totals(total, len(part), trunk)

    def _plan(self, groups: list[list[int]]) -> list[list[list[int]]]:
        """Plan micro-batches of at most `self.budget` tokens.

        Returns:
            A list of micro-batches. A micro-batch is a list of groups, and a group is a list of
            sample indices.
        """
        packs = plan_packs([self._lengths(g) for g in groups], self.budget, shared=self.shared)
        return [[[groups[s.group][i] for i in s.completions] for s in pack] for pack in packs]

    def _lengths(self, group: Sequence[int]) -> tuple[int, list[int]]:
        return self.samples.prompt_lengths[group[0]], [self.samples.lengths[i] for i in group]

    def _cost(self, group: Sequence[int]) -> int:
        """Return the number of trunk tokens of a group."""
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


@contextmanager
def explained_memory(batch: StepBatch) -> Iterator[None]:
    """Convert an out-of-memory error inside this context to a ValueError that says what to do."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        why = str(error).splitlines()[0]
        largest = max(micro.trunk_tokens for micro in batch.micro_batches)
        raise ValueError(
            f"tokens_per_microbatch: memory ran out with {largest} tokens ({why}); continue "
            "with resume=auto and fewer tokens; `grpo-fast plan` shows what "
            "model.gradient_checkpointing, model.tiled_mlp and model.lora save"
        ) from error
