"""LM head with a vocabulary sharded over the ranks of a process group (tensor parallelism).

All n ranks have the same hidden states and targets. Each rank has about V/n rows of the weight, its
shard. One all-gather per chunk exchanges the statistics of all shards, 24 bytes per row and rank.
Every rank joins them in the same order, with formulas that do not cancel. The index r stands for
the shard of rank r:

    lse  = log Σ_r e^lse_r
    logp = logp_o - log(1 + Σ_{r≠o} e^(lse_r - lse_o))         o: the shard that contains the target
    H    = Σ_r e^(lse_r - lse)·(H_r + lse - lse_r)

A rank computes the d-logits, dW and db of its columns without communication. dH is summed over
the shards by one all-reduce of (N, H) after all chunks, at least in fp32.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed

from grpo_fast.kernels import reference
from grpo_fast.kernels.head.sources import Chunk, DenseHead
from grpo_fast.kernels.head.sums import ChunkGradients
from grpo_fast.kernels.route import Route
from grpo_fast.kernels.types import ActiveRows, HeadTensors, LogitRows, RowStats


class VocabularyShard(NamedTuple):
    """The vocabulary shard of this rank.

    The shards are consecutive ranges of the vocabulary, in the order of the ranks.
    """

    group: distributed.ProcessGroup
    sizes: tuple[int, ...]  # number of weight rows of each rank, which may be 0
    rank: int  # rank of this process in the group

    @property
    def vocabulary(self) -> int:
        """Return the size of the full vocabulary."""
        return sum(self.sizes)

    def own(self, target_ids: Tensor) -> Tensor:
        """Convert target ids to row numbers of this shard. Ids in other shards become -1."""
        places = target_ids - sum(self.sizes[: self.rank])
        is_own = (places >= 0) & (places < self.sizes[self.rank])
        return torch.where(is_own, places, -1)

    def owners(self, target_ids: Tensor) -> Tensor:
        """Return the rank whose shard contains each target."""
        # Compare with one number at a time, because copying a tensor to a GPU costs a GPU sync.
        owners = torch.zeros_like(target_ids)
        for end in accumulate(self.sizes[:-1]):
            owners += target_ids >= end
        return owners

    def summed(self, x: Tensor) -> Tensor:
        """Return the sum of x over all ranks. It may overwrite x."""
        x = x.contiguous()
        distributed.all_reduce(x, group=self.group)
        return x

    def join_ranks(self, stats: RowStats, target_ids: Tensor) -> RowStats:
        """Combine the statistics of all shards into fp32 statistics over the full vocabulary."""
        # Use fp64, because fp32 would lose digits that the statistics of an unsharded row have.
        parts = torch.stack([x for x in stats if x is not None]).double()
        lse, logps, *entropies = gathered(parts, self.group).unbind(1)
        total = lse.logsumexp(0)
        owner = self.owners(target_ids)[None]
        own = lse.gather(0, owner)[0]
        logp = logps.gather(0, owner)[0]
        # Compute logp = logp_o - log(1 + Σ_{r≠o} e^(lse_r - lse_o)), where o is the shard of the
        # target.
        others = lse.scatter(0, owner, -torch.inf).logsumexp(0) - own
        logp = logp - torch.logaddexp(torch.zeros_like(others), others)
        # Set logp to -inf for a target with probability 0. The formula would subtract -inf from
        # -inf, which gives NaN.
        logp = torch.where(own == -torch.inf, own, logp)
        if not entropies:
            return total.float(), logp.float(), None
        share = (lse - total).exp()
        # Set the term of an empty shard to 0. Its lse is -inf, so the product would be 0·(-inf) =
        # NaN.
        terms = torch.where(share == 0, 0.0, share * (entropies[0] + (total - lse)))
        return total.float(), logp.float(), terms.sum(0).float()


def gathered(x: Tensor, group: distributed.ProcessGroup) -> Tensor:
    """Gather x from all ranks of a group, stacked in a new first dimension."""
    everyone = x.new_empty((distributed.get_world_size(group), *x.shape))
    distributed.all_gather(list(everyone), x, group=group)
    return everyone


def unrounded_statistics(rows: LogitRows, *, return_entropy: bool) -> RowStats:
    """Compute the same as `reference.row_logps`, but without the final rounding to fp32.

    If all columns of a row are -inf, its lse is -inf. The row then contributes nothing when the
    statistics of all shards are combined.
    """
    z, _ = reference.final_logits(rows.logits, rows.transform)
    ids = rows.target_ids
    lse, logps, entropy = reference.row_statistics(z, ids, return_entropy=return_entropy)
    return lse.masked_fill(z.amax(-1) == -torch.inf, -torch.inf), logps, entropy


class ShardedHead(DenseHead):
    """One vocabulary shard of an LM head. Statistics and dH are those of the full head."""

    def __init__(
        self,
        tensors: HeadTensors,
        rows: ActiveRows,
        route: Route,
        shard: VocabularyShard,
        **options: Any,
    ) -> None:
        self.shard = shard
        super().__init__(tensors, rows, route, **options)
        # Do not compute loss and gradient in one kernel, because the ranks must exchange statistics
        # before the loss.
        self.in_one_pass = False
        self.row_logps = self.kernels.row_logps
        if route.backend == "torch":
            self.row_logps = unrounded_statistics

    @property
    def widest(self) -> int:
        """Return the size of the largest shard, which determines the chunk size on all ranks."""
        return max(self.shard.sizes)

    def logps(self, at: Chunk, *, return_entropy: bool, stores: bool) -> RowStats:
        """Compute the statistics of this shard, and combine them with those of other shards."""
        z = self.logits(at)
        own = self.shard.own(at.target_ids)
        if z.shape[1]:
            rows = LogitRows(z, own, self.rows.transform)
            stats = self.row_logps(rows, return_entropy=return_entropy)
        else:
            # A shard without columns has the lse log 0 = -inf.
            nothing = own.new_full(own.shape, -torch.inf, dtype=self.dtype)
            stats = nothing, nothing, nothing if return_entropy else None
        return self.shard.join_ranks(stats, at.target_ids)

    def gradients(
        self, at: Chunk, known: RowStats, g: Tensor, g_entropy: Tensor | None
    ) -> ChunkGradients:
        """Compute the d-logits of this shard's columns, without communication."""
        if not self.weight.shape[0]:
            return ChunkGradients(self.gradient(at))
        at = at._replace(target_ids=self.shard.own(at.target_ids))
        return super().gradients(at, known, g, g_entropy)
