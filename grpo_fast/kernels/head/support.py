"""LM head pass for rows that have a token set, combined with a pass for rows that have none.

A row with a set of k ids costs 6·k·H instead of 6·V·H flops, and the row kernels process k logits.
The logits have one of three sources: gathered weight rows (gathered.py), a dense product with all
of W if it is cheaper because the sets are large, or logits that the caller provides.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from grpo_fast.kernels.head.entropy import FullEntropySweep
from grpo_fast.kernels.head.gathered import GatheredHead, SupportGradient
from grpo_fast.kernels.head.gradients import ChunkGradients, GradientSums
from grpo_fast.kernels.head.loop import LinearHead
from grpo_fast.kernels.head.products import matmul_logits
from grpo_fast.kernels.route import Route
from grpo_fast.kernels.support import HeadRows
from grpo_fast.kernels.types import (
    ActiveRows,
    HeadTensors,
    LogitTransform,
    RowLoss,
    RowStats,
    Wanted,
    pad_rows,
    padded,
    pick,
)
from grpo_fast.kernels.workspace import give_back_workspace, take_workspace, workspace_bytes
from grpo_fast.objective.coefficients import RowTerms
from grpo_fast.objective.config import LossConfig

# Time of a gathered logit, divided by the time of a logit in a dense product. On one core of an
# Intel Xeon (fp32, H = 896), we measured 11 to 18 if there are few distinct ids, and 28 to 33 if
# each weight row is read from memory.
GATHERED_COST = 32
# The same ratio for a GPU, estimated from L2 bandwidth and tensor-core flops.
GATHERED_COST_GPU = 128


def linear_sweep(
    tensors: HeadTensors, rows: ActiveRows, route: Route, full_entropy: bool = False, **options: Any
) -> LinearHead | SupportSweep | FullEntropySweep:
    """Create the object that computes the LM head for rows with or without token sets.

    Args:
        tensors: hidden, weight and bias.
        rows: the active rows and their token sets, if any.
        route: the selected kernels.
        full_entropy: compute entropies over the full vocabulary, and logps over the token sets.
        options: arguments of `LinearHead`.
    """
    if rows.support is None:
        return LinearHead(tensors, rows, route, **options)
    if full_entropy:
        supported = linear_sweep(tensors, rows, route, **options | {"entropy_gradient": False})
        full = LinearHead(tensors, rows._replace(support=None), route, **options)
        return FullEntropySweep(supported, full)
    support = rows.support
    dense = None
    keep_fp32 = options.pop("keep_fp32", False)
    if support.dense_index is not None:
        dense = LinearHead(
            tensors, rows.select(support.dense_index), route, keep_fp32=True, **options
        )
    head = supported_head(tensors, rows, route, keep_fp32=keep_fp32)
    return SupportSweep(head, rows, dense, options.get("entropy_gradient", False))


def supported_head(
    tensors: HeadTensors, rows: ActiveRows, route: Route, *, keep_fp32: bool
) -> GatheredHead:
    """Return the cheaper head for the supports of the rows: `GatheredHead` or `DenseHead`."""
    assert rows.support is not None
    cost = GATHERED_COST_GPU if route.backend == "triton" else GATHERED_COST
    # Use the dense product if computing all R·V logits takes less time than gathering one logit per
    # id.
    is_large = len(rows.support.ids) * cost > len(rows.support.places) * len(tensors.weight)
    form = DenseHead if is_large else GatheredHead
    return form(tensors, rows, route, keep_fp32=keep_fp32)


@dataclass(eq=False)
class SupportSweep:
    """Pass over all active rows, which merges the results of rows with and without a token set.

    Args:
        source: computes the logits of the token sets, and the gradients from their d-logits.
        rows: all active rows.
        dense: the pass over rows without a token set, or None.
        entropy_gradient: whether the coefficients will include dL/dentropy.
    """

    source: GatheredHead | GivenLogits
    rows: ActiveRows
    dense: Any
    entropy_gradient: bool = False
    cached: HeadRows | None = field(default=None, init=False)
    filtered = None

    def __post_init__(self) -> None:
        rows = self.rows
        assert rows.support is not None
        self.support = rows.support
        self.transform = rows.transform.rows(rows.support.row_index)
        self.kernels = self.source.kernels
        self.has_entropy_gradient = self.dense is None or self.dense.has_entropy_gradient
        self.num_rows = rows.target_ids.shape[0]

    def logps(self, *, return_entropy: bool, keep: bool = False) -> RowStats:
        """Compute (lse, logps, entropy) of all active rows, (T,) fp32 each.

        With `keep`, the logits are cached for `gradients`.
        """
        # With slopes, the backward pass need not read the weight rows again. With an entropy
        # gradient, it must read them anyway.
        has_slopes = keep and not self.entropy_gradient
        own = self.source.rows(
            self.transform, return_entropy=return_entropy, return_slopes=has_slopes
        )
        self.cached = own if keep else None
        others = (None,) * 3
        if self.dense is not None:
            others = self.dense.logps(return_entropy=return_entropy, keep=keep)
        merge = self.support.merge_rows
        pairs = zip(own.stats, others, strict=True)
        return tuple(None if x is None else merge(x, y) for x, y in pairs)  # type: ignore[return-value]

    def loss_gradients(
        self, terms: RowTerms, config: LossConfig, wanted: Wanted
    ) -> tuple[RowLoss, tuple[Tensor, ...]]:
        """Compute the policy loss and its gradients."""
        stats = self.logps(return_entropy=config.needs_entropy, keep=True)
        losses, g = self.kernels.row_coefficients(stats[1], terms, config)
        return RowLoss(*stats, losses, g), self.gradients(g, terms.grad_entropy, stats, wanted)

    def gradients(
        self, g: Tensor, g_entropy: Tensor | None, known: RowStats, wanted: Wanted
    ) -> tuple[Tensor, ...]:
        """Compute the gradients of Σ (g·logp + g_entropy·entropy).

        `known` contains the statistics that `logps` returned.
        """
        if not any(wanted):
            return self.source.no_gradients()
        cached = self.cached
        self.cached = None
        if cached is None:
            has_slopes = g_entropy is None
            cached = self.source.rows(
                self.transform, return_entropy=False, return_slopes=has_slopes
            )
        others = None
        i = self.support.dense_index
        if self.dense is not None and i is not None:
            others = self.dense.gradients(*pick(i, g, g_entropy), pick(i, *known), wanted)
        mine = slice(None) if self.support.row_index is None else self.support.row_index
        g, g_entropy = pick(mine, g, g_entropy)
        own = pick(mine, *known)
        of_rows = cached.raw[None], self.support.places, own, g, g_entropy, self.transform
        d = self.kernels.row_grad_(*of_rows, offsets=self.support.offsets)[0]
        slopes = None if g_entropy is not None else cached.slopes
        return self.source.gradients(SupportGradient(d, g, slopes), wanted, others)


# A tuple: the rows, their hidden states, the slice of the nnz ids that belongs to the rows, the row
# and column of each id, and a logit buffer.
DenseChunk = tuple[slice, Tensor, slice, tuple[Tensor, Tensor], Tensor]


class DenseHead(GatheredHead):
    """LM head for rows with large token sets. It multiplies by all of W."""

    def _chunks(self) -> Iterator[DenseChunk]:
        """Yield the chunks of the rows, each with its hidden states and a logit buffer."""
        support = self.support
        size = self.sum_dtype.itemsize
        vocab = self.weight.shape[0]
        count = len(support.places)
        step = max(workspace_bytes(self.weight.device, size) // (vocab * size), 1)
        workspace = take_workspace(padded(min(step, count)), vocab, self.weight, self.sum_dtype)
        for start in range(0, count, step):
            rows = slice(start, min(start + step, count))
            index = rows if self.index is None else self.index[rows]
            h = pad_rows(self.hidden[index]).contiguous()
            # Read the number of ids in the chunk, which determines tensor shapes. On a GPU, this
            # waits for the device.
            first, end = support.offsets[[rows.start, rows.stop]].tolist()
            at = support.rows[first:end] - start, support.ids[first:end]
            yield rows, h, slice(first, end), at, workspace[: h.shape[0]]
        give_back_workspace(workspace)

    def rows(
        self, transform: LogitTransform, *, return_entropy: bool, return_slopes: bool
    ) -> HeadRows:
        """Compute the logits at the ids of every set, and the statistics of every row.

        `return_slopes` is ignored, and the slopes are None.
        """
        raw = self.weight.new_zeros(len(self.support.ids), dtype=self.sum_dtype)
        for _, h, places, at, z in self._chunks():
            matmul_logits(h, self.weight, out=z)
            raw[places] = z[at]
        if self.bias is not None:
            raw += self.bias[self.support.ids].to(self.sum_dtype)
        return _head_rows(self, raw, transform, return_entropy)

    def gradients(
        self, of_rows: SupportGradient, wanted: Wanted, others: tuple[Tensor, ...] | None
    ) -> tuple[Tensor, ...]:
        """Compute the gradients (dH, dW, db) of the rows that have a token set.

        If `others` is given, it contains the gradients of the rows that have no token set, and the
        new gradients are added to it.
        """
        keep_fp32 = self.keep_fp32 or others is not None
        sums = GradientSums(
            self.tensors, wanted, index=self.index, repeats=self.repeats, keep_fp32=keep_fp32
        )
        if others is not None:
            # Start from the gradients of the rows that have no token set.
            starts = (x if need else None for x, need in zip(others, wanted, strict=True))
            sums.d_hidden, sums.d_weight, sums.d_bias = starts
        for rows, h, places, at, z in self._chunks():
            # Scatter the d-logits of the sets into a dense matrix, which is 0 outside the sets.
            z.zero_()[at] = of_rows.d_logits[places]
            sums.add(rows, h, ChunkGradients(z), rows.stop - rows.start, None)
        return self._narrowed(*sums.finish())


class GivenLogits:
    """Source of the logits of rows with a token set: a matrix that the caller provides.

    Args:
        logits: (N, V), rows contiguous.
        out: (N, V) destination of the d-logits, which may be `logits`; None: it is allocated.
        rows: all active rows.
        route: the selected kernels.
    """

    def __init__(self, logits: Tensor, out: Tensor | None, rows: ActiveRows, route: Route) -> None:
        assert rows.support is not None
        self.logits = logits
        self.out = out
        self.support = rows.support
        self.kernels = route.kernels
        index = rows.active_index
        # Without an index, the active rows are all rows of the given logits, in order.
        index = torch.arange(rows.num_rows, device=logits.device) if index is None else index
        self.at = self.support.select(index)[self.support.rows], self.support.ids

    def rows(
        self, transform: LogitTransform, *, return_entropy: bool, return_slopes: bool
    ) -> HeadRows:
        """Look up the logits at the ids of every set, and compute the statistics of every row."""
        raw = self.logits[self.at].to(torch.promote_types(self.logits.dtype, torch.float32))
        return _head_rows(self, raw, transform, return_entropy)

    def no_gradients(self) -> tuple[Tensor, ...]:
        """Return a tuple with one empty tensor in place of the gradient."""
        return (self.logits.new_empty(0),)

    def gradients(
        self, of_rows: SupportGradient, wanted: Wanted, others: tuple[Tensor, ...] | None
    ) -> tuple[Tensor, ...]:
        """Write the d-logits of the rows with a token set into a matrix, and return (matrix,).

        If `others` is given, it contains the matrix to write into, which already holds the d-logits
        of the rows that have no token set.
        """
        if others is not None:
            out = others[0]
        elif self.out is not None:
            out = self.out.zero_()
        else:
            out = torch.zeros_like(self.logits, memory_format=torch.contiguous_format)
        out[self.at] = of_rows.d_logits.to(out.dtype)
        return (out,)


def _head_rows(
    source: DenseHead | GivenLogits, raw: Tensor, transform: LogitTransform, return_entropy: bool
) -> HeadRows:
    """Compute the statistics of every row from the raw logits of its token set."""
    places = source.support.places
    offsets = source.support.offsets
    row_logps = source.kernels.row_logps
    stats = row_logps(raw[None], places, transform, return_entropy=return_entropy, offsets=offsets)
    return HeadRows(raw, stats, None)
