"""Sources of logits for rows that have a token set, which a truncating sampler kept.

A row with a set of k ids costs 6·k·H instead of 6·V·H flops, and the row kernels process k logits.
All rows with a set form one chunk, whose logits take O(nnz) memory. There are three sources of
these logits:

    GatheredSets  gathers the rows of W for the ids in the sets
    ProductSets   multiplies by all of W, which is cheaper if the sets are large
    GivenSets     looks the logits up in logits that the caller gives (given.py)

Rows without a set use the sources of sources.py.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from grpo_fast.kernels.head.products import matmul_logits
from grpo_fast.kernels.head.sources import Chunk, RowSource
from grpo_fast.kernels.head.sums import ChunkGradients, HeadSums
from grpo_fast.kernels.route import Route, kernel_module
from grpo_fast.kernels.types import (
    ActiveRows,
    HeadInputs,
    HeadRows,
    HeadTensors,
    RowStats,
    pad_rows,
    padded,
)
from grpo_fast.kernels.workspace import give_back_workspace, take_workspace, workspace_bytes

# Time of a gathered logit, divided by the time of a logit in a dense product. On one core of an
# Intel Xeon (fp32, H = 896), we measured 11 to 18 if there are few distinct ids, and 28 to 33 if
# each weight row is read from memory.
GATHERED_COST = 32
# The same ratio for a GPU, estimated from L2 bandwidth and tensor-core flops.
GATHERED_COST_GPU = 128


class TokenSets(RowSource):
    """Rows that have a token set. Their logits are stored one set after another, (nnz,).

    Args:
        rows: all active rows, with their token sets.
        route: the selected kernels.
    """

    def __init__(self, rows: ActiveRows, route: Route) -> None:
        assert rows.support is not None
        self.support = rows.support
        super().__init__(rows.select(self.support.row_index), route)
        self.offsets = self.support.offsets
        # Whether the d-logits are needed to compute dH. Otherwise, the slopes of the forward pass
        # give it, and the backward pass need not read the weight rows again.
        self.needs_d_logits = False
        self._stored: HeadRows | None = None

    def chunk(self, index: slice | Tensor, *, stores: bool = True) -> Chunk:
        """Return all rows. A target id is the position of the target in its set."""
        return Chunk(index, self.support.places)

    def head_rows(self, at: Chunk, *, return_entropy: bool, return_slopes: bool) -> HeadRows:
        """Compute the logits at the ids of every set, and the statistics of every row.

        This base class ignores `return_slopes` and computes no slopes.
        """
        raw = self.raw()
        rows = self.logit_rows(at, raw[None])
        stats = self.kernels.row_logps(rows, return_entropy=return_entropy)
        return HeadRows(raw, stats, None)

    def raw(self) -> Tensor:
        """Return the logits at the ids of every set, (nnz,)."""
        raise NotImplementedError

    def logits(self, at: Chunk) -> Tensor:
        """Return the logits of `logps`, which precedes every gradient."""
        assert self._stored is not None
        return self._stored.raw[None]

    def logps(self, at: Chunk, *, return_entropy: bool, stores: bool) -> RowStats:
        slopes = stores and not self.needs_d_logits
        found = self.head_rows(at, return_entropy=return_entropy, return_slopes=slopes)
        self._stored = found if stores else None
        return found.stats

    def gradients(
        self, at: Chunk, known: RowStats, g: Tensor, g_entropy: Tensor | None
    ) -> ChunkGradients:
        if not at.cached or self._stored is None:
            wants_slopes = g_entropy is None and not self.needs_d_logits
            self._stored = self.head_rows(at, return_entropy=False, return_slopes=wants_slopes)
        slopes = self._stored.slopes
        found = super().gradients(at, known, g, g_entropy)
        self._stored = None  # its logits were overwritten
        # With an entropy gradient, dH is not a multiple of d logp/d hidden.
        if slopes is None or g_entropy is not None:
            return found
        return found._replace(slopes=(slopes, g))

    def release(self) -> None:
        self._stored = None


class GatheredSets(TokenSets):
    """Token sets whose logits come from gathered rows of W."""

    def __init__(self, tensors: HeadTensors, rows: ActiveRows, route: Route) -> None:
        super().__init__(rows, route)
        self.support = self.support._replace(hidden_index=self.rows.hidden_index)
        self.tensors = tensors
        self.module = kernel_module("support", route.backend)

    def head_rows(self, at: Chunk, *, return_entropy: bool, return_slopes: bool) -> HeadRows:
        p = HeadInputs(*self.tensors, at.target_ids, self.rows.transform)
        found: HeadRows = self.module.head_rows(
            p, self.support, return_entropy=return_entropy, return_slopes=return_slopes
        )
        return found

    def add(self, sums: HeadSums, at: Chunk, d_logits: ChunkGradients, keep: Tensor | None) -> None:
        """Add the gradients of the rows to dH, dW and db."""
        sums.add_sets(d_logits, self.support, self.module)


class ProductSets(GatheredSets):
    """Large token sets. Their logits come from products with all of W, chunk by chunk."""

    def raw(self) -> Tensor:
        hidden, weight, bias = self.tensors
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        raw = weight.new_zeros(len(self.support.ids), dtype=dtype)
        for _, h, places, at, z in self._products(dtype):
            matmul_logits(h, weight, out=z)
            raw[places] = z[at]
        if bias is not None:
            raw += bias[self.support.ids].to(dtype)
        return raw

    head_rows = TokenSets.head_rows  # without slopes

    def add(self, sums: HeadSums, at: Chunk, d_logits: ChunkGradients, keep: Tensor | None) -> None:
        """Add the gradients of the rows to dH, dW and db."""
        for rows, h, places, at_ids, z in self._products(sums.dtype):
            # Scatter the d-logits of the sets into a dense matrix, which is 0 outside the sets.
            z.zero_()[at_ids] = d_logits.matrix[places]
            index = self.support.hidden_index
            of_hidden = rows if index is None else index[rows]
            sums.add(of_hidden, h, ChunkGradients(z), rows.stop - rows.start, None)

    def _products(
        self, dtype: torch.dtype
    ) -> Iterator[tuple[slice, Tensor, slice, tuple[Tensor, Tensor], Tensor]]:
        """Yield the chunks of the rows.

        Yields:
            The rows, their hidden states, the slice of the nnz ids that belongs to the rows, the
            row and column of each id, and a logit buffer.
        """
        hidden, weight, _ = self.tensors
        support = self.support
        index = support.hidden_index
        count, row_bytes = len(support.places), len(weight) * dtype.itemsize
        step = max(workspace_bytes(weight.device, dtype.itemsize) // row_bytes, 1)
        workspace = take_workspace(padded(min(step, count)), len(weight), weight, dtype)
        for start in range(0, count, step):
            rows = slice(start, min(start + step, count))
            h = pad_rows(hidden[rows if index is None else index[rows]]).contiguous()
            # Read the number of ids in the chunk, which determines tensor shapes. On a GPU, this
            # waits for the device.
            first, end = support.offsets[[rows.start, rows.stop]].tolist()
            at = support.rows[first:end] - start, support.ids[first:end]
            yield rows, h, slice(first, end), at, workspace[: h.shape[0]]
        give_back_workspace(workspace)


def sets_of_head(tensors: HeadTensors, rows: ActiveRows, route: Route) -> GatheredSets:
    """Return the cheaper source for the token sets of the rows."""
    assert rows.support is not None
    cost = GATHERED_COST_GPU if route.backend == "triton" else GATHERED_COST
    # Use products with all of W if computing all R·V logits takes less time than gathering one
    # logit per id.
    is_large = len(rows.support.ids) * cost > len(rows.support.places) * len(tensors.weight)
    return (ProductSets if is_large else GatheredSets)(tensors, rows, route)
