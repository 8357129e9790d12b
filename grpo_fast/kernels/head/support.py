"""Rows whose logits exist only in a sampler's support, beside rows with the whole vocabulary.

A row of k ids costs 6·k·H instead of 6·V·H; the row kernels see k logits in place of V. Logits of a
head come from the rows of W that the ids name (gathered.py), or, where the sets are so large that
this costs more, from the dense product (below). Given logits are looked up.
"""

from __future__ import annotations

from collections.abc import Iterator
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
    pick,
)
from grpo_fast.kernels.workspace import give_back_workspace, take_workspace, workspace_bytes
from grpo_fast.objective.coefficients import RowTerms
from grpo_fast.objective.config import LossConfig

# A gathered logit costs at most as much as this many of a dense product (fp32, one core of an Intel
# Xeon, H = 896: 11 to 18 where the ids are few, 28 to 33 where each row of W comes from memory).
GATHERED_COST = 32
# The same on a GPU, by the bytes that L2 delivers and the flops of tensor cores; not measured.
GATHERED_COST_GPU = 128


def linear_sweep(
    tensors: HeadTensors, rows: ActiveRows, route: Route, full_entropy: bool = False, **options: Any
) -> LinearHead | SupportSweep | FullEntropySweep:
    """The sweep of a head over these rows; `options` are those of `LinearHead`.

    full_entropy: entropies are over the whole vocabulary, logps in the rows' support.
    """
    if rows.support is None:
        return LinearHead(tensors, rows, route, **options)
    if full_entropy:
        inside = linear_sweep(tensors, rows, route, **options | {"entropy_gradient": False})
        whole = LinearHead(tensors, rows._replace(support=None), route, **options)
        return FullEntropySweep(inside, whole)
    support = rows.support
    dense = None
    keep_fp32 = options.pop("keep_fp32", False)
    if support.dense_index is not None:
        dense = LinearHead(
            tensors, rows.select(support.dense_index), route, keep_fp32=True, **options
        )
    head = supported_head(tensors, rows, route, keep_fp32=keep_fp32)
    has_entropy = options.get("entropy_gradient", False)
    return SupportSweep(head, rows, route, dense, entropy_gradient=has_entropy)


def supported_head(
    tensors: HeadTensors, rows: ActiveRows, route: Route, *, keep_fp32: bool
) -> GatheredHead:
    """Logits in the support of these rows, in the way that costs less."""
    assert rows.support is not None
    cost = GATHERED_COST_GPU if route.backend == "triton" else GATHERED_COST
    is_large = len(rows.support.ids) * cost > len(rows.support.places) * len(tensors.weight)
    form = DenseHead if is_large else GatheredHead
    return form(tensors, rows, route, keep_fp32=keep_fp32)


class SupportSweep:
    """All active rows: those with a support from `source`, the others from `dense`.

    Args:
        source: what gives logits in the support, and takes their gradient.
        dense: the sweep over the other rows; None: there are none.
        entropy_gradient: the coefficients will have a dL/dentropy.
    """

    filtered = None

    def __init__(
        self,
        source: GatheredHead | GivenLogits,
        rows: ActiveRows,
        route: Route,
        dense: Any,
        *,
        entropy_gradient: bool = False,
    ) -> None:
        assert rows.support is not None
        self.source = source
        self.dense = dense
        self.support = rows.support
        self.transform = (
            rows.transform
            if rows.support.row_index is None
            else rows.transform.rows(rows.support.row_index)
        )
        self.kernels = route.kernels
        self.row_coefficients = route.kernels.row_coefficients
        self.entropy_gradient = entropy_gradient
        self.num_rows = rows.target_ids.shape[0]
        self.cached: HeadRows | None = None

    @property
    def has_entropy_gradient(self) -> bool:
        return self.dense is None or self.dense.has_entropy_gradient

    def logps(self, *, return_entropy: bool, keep: bool = False) -> RowStats:
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
        stats = self.logps(return_entropy=config.needs_entropy, keep=True)
        losses, g = self.row_coefficients(stats[1], terms, config)
        return RowLoss(*stats, losses, g), self.gradients(g, terms.grad_entropy, stats, wanted)

    def gradients(
        self, g: Tensor, g_entropy: Tensor | None, known: RowStats, wanted: Wanted
    ) -> tuple[Tensor, ...]:
        """The gradients of Σ g·logp + g_entropy·entropy, all (T,), after `logps` gave `known`."""
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


# Rows, their hidden rows, the places of their ids among all, the row and column of each id, and a
# matrix for their logits.
DenseChunk = tuple[slice, Tensor, slice, tuple[Tensor, Tensor], Tensor]


class DenseHead(GatheredHead):
    """Logits of a head in the support, from the product with all of W."""

    def _chunks(self) -> Iterator[DenseChunk]:
        """Rows, their hidden rows (padded C, H), their ids' places among all, the row and column of
        each, and a matrix (padded C, V) for their logits.
        """
        hidden = self.hidden
        weight = self.weight
        dtype = self.sum_dtype
        support = self.support
        index = self.index
        count = len(self.support.places)
        row_bytes = weight.shape[0] * dtype.itemsize
        step = max(workspace_bytes(weight.device, dtype.itemsize) // row_bytes, 1)
        workspace = None
        for start in range(0, count, step):
            rows = slice(start, min(start + step, count))
            h = pad_rows(hidden[rows] if index is None else hidden[index[rows]]).contiguous()
            if workspace is None:
                workspace = take_workspace(h.shape[0], weight.shape[0], weight, dtype)
            first, end = support.offsets[[rows.start, rows.stop]].tolist()
            at = support.rows[first:end] - start, support.ids[first:end]
            yield rows, h, slice(first, end), at, workspace[: h.shape[0]]
        give_back_workspace(workspace)

    def rows(
        self, transform: LogitTransform, *, return_entropy: bool, return_slopes: bool
    ) -> HeadRows:
        """Without slopes: they are not wanted."""
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
        keep_fp32 = self.keep_fp32 or others is not None
        sums = GradientSums(
            self.tensors, wanted, index=self.index, repeats=self.repeats, keep_fp32=keep_fp32
        )
        if others is not None:
            starts = (x if need else None for x, need in zip(others, wanted, strict=True))
            sums.d_hidden, sums.d_weight, sums.d_bias = starts
        for rows, h, places, at, z in self._chunks():
            z.zero_()[at] = of_rows.d_logits[places]
            sums.add(rows, h, ChunkGradients(z), rows.stop - rows.start, None)
        return self._narrowed(*sums.finish())


class GivenLogits:
    """Given logits in the support.

    Args:
        logits: (N, V), rows contiguous.
        out: (N, V) where d-logits go, which may be `logits`; None: fresh memory.
        rows: all active ones.
    """

    def __init__(self, logits: Tensor, out: Tensor | None, rows: ActiveRows, route: Route) -> None:
        assert rows.support is not None
        self.logits = logits
        self.out = out
        self.support = rows.support
        self.kernels = route.kernels
        index = rows.active_index
        index = torch.arange(rows.num_rows, device=logits.device) if index is None else index
        self.at = self.support.select(index)[self.support.rows], self.support.ids

    def rows(
        self, transform: LogitTransform, *, return_entropy: bool, return_slopes: bool
    ) -> HeadRows:
        raw = self.logits[self.at].to(torch.promote_types(self.logits.dtype, torch.float32))
        return _head_rows(self, raw, transform, return_entropy)

    def no_gradients(self) -> tuple[Tensor, ...]:
        return (self.logits.new_empty(0),)

    def gradients(
        self, of_rows: SupportGradient, wanted: Wanted, others: tuple[Tensor, ...] | None
    ) -> tuple[Tensor, ...]:
        """(d-logits,) from those in the support, beside the rows of `others`."""
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
    places = source.support.places
    offsets = source.support.offsets
    row_logps = source.kernels.row_logps
    stats = row_logps(raw[None], places, transform, return_entropy=return_entropy, offsets=offsets)
    return HeadRows(raw, stats, None)
