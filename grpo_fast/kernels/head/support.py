"""Rows whose logits exist only in a sampler's support, beside rows with the whole vocabulary.

A row of k ids costs 6·k·H instead of 6·V·H. Everything behind a logp is that of other rows: the
row kernels see k logits in place of V. Logits of a head come in two ways: from the rows of W that
the ids name (gathered.py), or, where the sets are so large that this costs more, from the dense
product, of which the other columns are dropped (below). Given logits are looked up.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from grpo_fast.kernels.head.entropy import WholeEntropy
from grpo_fast.kernels.head.gathered import GatheredHead
from grpo_fast.kernels.head.gradients import ChunkGradients, GradientSums
from grpo_fast.kernels.head.loop import LinearHead
from grpo_fast.kernels.head.products import matmul_wide
from grpo_fast.kernels.route import Route, support_doors
from grpo_fast.kernels.support import HeadRows, SupportRows
from grpo_fast.kernels.types import ActiveRows, LogitRule, RowLoss, RowStats, Wanted, pad_rows
from grpo_fast.kernels.workspace import give_back_workspace, take_workspace, workspace_bytes
from grpo_fast.objective.coefficients import RowTerms
from grpo_fast.objective.config import LossConfig

# A gathered logit costs at most as much as this many of a dense product (fp32, one core of an Intel
# Xeon, H = 896: 11 to 18 where the ids are few, 28 to 33 where each row of W comes from memory).
GATHERED_COST = 32
# The same on a GPU, by the bytes that L2 delivers and the flops of tensor cores; not measured.
GATHERED_COST_GPU = 128


def linear_sweep(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    rows: ActiveRows,
    route: Route,
    whole_entropy: bool = False,
    **options: Any,
) -> LinearHead | SupportSweep | WholeEntropy:
    """The sweep of a head over these rows; `options` are those of `LinearHead`.

    whole_entropy: entropies are over the whole vocabulary, logps in the rows' support.
    """
    if rows.support is None:
        return LinearHead(hidden, weight, bias, rows, route, **options)
    if whole_entropy:
        inside = linear_sweep(hidden, weight, bias, rows, route,
                              **{**options, "entropy_gradient": False})  # fmt: skip
        whole = LinearHead(hidden, weight, bias, rows._replace(support=None), route, **options)
        return WholeEntropy(inside, whole)
    support, dense, is_wide = rows.support, None, options.pop("is_wide", False)
    if support.others is not None:
        rest = rows.select(support.others)
        dense = LinearHead(hidden, weight, bias, rest, route, is_wide=True, **options)
    head = supported_head(hidden, weight, bias, rows, route, is_wide=is_wide)
    return SupportSweep(
        head, rows, route, dense, entropy_gradient=options.get("entropy_gradient", False)
    )


def supported_head(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    rows: ActiveRows,
    route: Route,
    *,
    is_wide: bool,
) -> GatheredHead | DenseHead:
    """Logits in the support of these rows, in the way that costs less."""
    assert rows.support is not None
    cost = GATHERED_COST_GPU if route.backend == "triton" else GATHERED_COST
    is_large = len(rows.support.ids) * cost > len(rows.support.places) * weight.shape[0]
    form = DenseHead if is_large else GatheredHead
    return form(hidden, weight, bias, rows, route, is_wide=is_wide)


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
        source: GatheredHead | DenseHead | GivenLogits,
        rows: ActiveRows,
        route: Route,
        dense: Any,
        *,
        entropy_gradient: bool = False,
    ) -> None:
        assert rows.support is not None
        self.source, self.dense, self.support = source, dense, rows.support
        self.rule = rows.rule if rows.support.own is None else rows.rule.rows(rows.support.own)
        self.row_coefficients = route.kernels.row_coefficients
        self.doors, self.entropy_gradient = support_doors(route.backend), entropy_gradient
        self.num_rows = rows.target_ids.shape[0]
        self.held: HeadRows | None = None

    @property
    def has_entropy_gradient(self) -> bool:
        return self.dense is None or self.dense.has_entropy_gradient

    def logps(self, *, return_entropy: bool, keep: bool = False) -> RowStats:
        """(lse, logps, entropy) of the active rows, (T,) fp32."""
        has_slopes = keep and not self.entropy_gradient
        found = self.source.rows(self.rule, return_entropy=return_entropy, return_slopes=has_slopes)
        self.held, others = found if keep else None, (None,) * 3
        if self.dense is not None:
            others = self.dense.logps(return_entropy=return_entropy, keep=keep)
        lse, logps, entropy = (
            None if x is None else self.support.merge_rows(x, y)
            for x, y in zip(found.stats, others, strict=True)
        )
        assert lse is not None and logps is not None
        return lse, logps, entropy

    def loss_gradients(
        self, terms: RowTerms, config: LossConfig, wanted: Wanted
    ) -> tuple[RowLoss, tuple[Tensor, ...]]:
        """Row losses, and the gradients of a loss whose coefficients follow row by row."""
        stats = self.logps(return_entropy=config.needs_entropy, keep=True)
        losses, g = self.row_coefficients(stats[1], terms, config)
        return RowLoss(*stats, losses, g), self.gradients(g, terms.grad_entropy, stats, wanted)

    def gradients(
        self, g: Tensor, g_entropy: Tensor | None, known: RowStats, wanted: Wanted
    ) -> tuple[Tensor, ...]:
        """Those of Σ g·logp + g_entropy·entropy, all (T,), after `logps` gave `known`."""
        if not any(wanted):
            return self.source.nothing()
        found, self.held = self.held, None
        if found is None:
            has_slopes = g_entropy is None
            found = self.source.rows(self.rule, return_entropy=False, return_slopes=has_slopes)
        others = None
        if self.dense is not None:
            i = self.support.others
            at: RowStats = tuple(None if x is None else x[i] for x in known)  # type: ignore[assignment]
            of_entropy = None if g_entropy is None else g_entropy[i]
            others = self.dense.gradients(g[i], of_entropy, at, wanted)
        of_all = self.support.of_all
        own: RowStats = tuple(None if x is None else of_all(x) for x in known)  # type: ignore[assignment]
        g, g_entropy = of_all(g), None if g_entropy is None else of_all(g_entropy)
        d = self.doors.row_grad_(found.raw, self.support, own, g, g_entropy, self.rule)
        slopes = None if g_entropy is not None else found.slopes
        return self.source.gradients(d, g, slopes, wanted, others)


class DenseHead:
    """Logits of a head in the support, from the product with all of W. Arguments and methods are
    those of `GatheredHead`.
    """

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        rows: ActiveRows,
        route: Route,
        *,
        is_wide: bool,
    ) -> None:
        assert rows.support is not None
        self.support: SupportRows = rows.support
        self.tensors, self.is_wide = (hidden, weight, bias), is_wide
        self.active = rows.select(self.support.own)
        self.doors = support_doors(route.backend)
        self.dtype = torch.promote_types(weight.dtype, torch.float32)
        row_bytes = weight.shape[0] * self.dtype.itemsize
        self.step = max(workspace_bytes(weight.device, self.dtype.itemsize) // row_bytes, 1)

    def _chunks(self):
        """Rows from one on to another, their hidden rows (padded C, H), the places of their ids
        among all, the row and the column of each, and a matrix (padded C, V) for their logits.
        """
        hidden, weight, _ = self.tensors
        support, index, count = self.support, self.active.hidden_index, len(self.support.places)
        workspace = None
        for start in range(0, count, self.step):
            rows = slice(start, min(start + self.step, count))
            h = pad_rows(hidden[rows] if index is None else hidden[index[rows]]).contiguous()
            if workspace is None:
                workspace = take_workspace(h.shape[0], weight.shape[0], weight, self.dtype)
            first, end = support.offsets[[rows.start, rows.stop]].tolist()
            at = support.rows[first:end] - start, support.ids[first:end]
            yield rows, h, slice(first, end), at, workspace[: h.shape[0]]
        give_back_workspace(workspace)

    def rows(self, rule: LogitRule, *, return_entropy: bool, return_slopes: bool) -> HeadRows:
        """Without slopes: they are not wanted."""
        _, weight, bias = self.tensors
        raw = weight.new_zeros(len(self.support.ids), dtype=self.dtype)
        for _, h, places, at, z in self._chunks():
            matmul_wide(h, weight, out=z)
            raw[places] = z[at]
        if bias is not None:
            raw += bias[self.support.ids].to(self.dtype)
        stats = self.doors.row_logps(raw, self.support, rule, return_entropy=return_entropy)
        return HeadRows(raw, stats, None)

    def nothing(self) -> tuple[Tensor, ...]:
        return (self.tensors[0].new_empty(0),) * 3

    def gradients(
        self,
        d: Tensor,
        g: Tensor,
        slopes: Tensor | None,
        wanted: Wanted,
        others: tuple[Tensor, ...] | None,
    ) -> tuple[Tensor, ...]:
        sums = GradientSums(
            *self.tensors, wanted, index=self.active.hidden_index, repeats=self.active.repeats,
            is_wide=self.is_wide or others is not None,
        )  # fmt: skip
        if others is not None:
            starts = (x if need else None for x, need in zip(others, wanted, strict=True))
            sums.d_hidden, sums.d_weight, sums.d_bias = starts
        for rows, h, places, at, z in self._chunks():
            z.zero_()[at] = d[places]
            sums.add(rows, h, ChunkGradients(z), rows.stop - rows.start, None)
        likes = (self.tensors[0] if x is None else x for x in self.tensors)
        return tuple(
            x if self.is_wide else x.to(like.dtype)
            for x, like in zip(sums.finish(), likes, strict=True)
        )


class GivenLogits:
    """Given logits in the support.

    Args:
        logits: (N, V), rows contiguous.
        out: (N, V) where d-logits go, which may be `logits`; None: fresh memory.
        rows: all active ones.
    """

    def __init__(self, logits: Tensor, out: Tensor | None, rows: ActiveRows, route: Route) -> None:
        assert rows.support is not None
        self.logits, self.out, self.support = logits, out, rows.support
        self.doors = support_doors(route.backend)
        kept = torch.arange(rows.num_rows, device=logits.device) if rows.kept is None else rows.kept
        self.at = self.support.of_all(kept)[self.support.rows], self.support.ids

    def rows(self, rule: LogitRule, *, return_entropy: bool, return_slopes: bool) -> HeadRows:
        raw = self.logits[self.at].to(torch.promote_types(self.logits.dtype, torch.float32))
        stats = self.doors.row_logps(raw, self.support, rule, return_entropy=return_entropy)
        return HeadRows(raw, stats, None)

    def nothing(self) -> tuple[Tensor, ...]:
        return (self.logits.new_empty(0),)

    def gradients(
        self,
        d: Tensor,
        g: Tensor,
        slopes: Tensor | None,
        wanted: Wanted,
        others: tuple[Tensor, ...] | None,
    ) -> tuple[Tensor, ...]:
        """(d-logits,) from those in the support (nnz,), beside the rows of `others`."""
        if others is not None:
            out = others[0]
        elif self.out is not None:
            out = self.out.zero_()
        else:
            out = torch.zeros_like(self.logits, memory_format=torch.contiguous_format)
        out[self.at] = d.to(out.dtype)
        return (out,)
