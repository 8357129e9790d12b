"""Rows whose logits exist only in a sampler's support, beside rows with the whole vocabulary.

A row of k ids costs 6·k·H instead of 6·V·H. Everything behind a logp is that of other rows: the
row kernels see k logits in place of V (support_reference.py).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from grpo_fast.kernels.head.loop import LinearHead
from grpo_fast.kernels.route import Route
from grpo_fast.kernels.support import SupportRows
from grpo_fast.kernels.types import ActiveRows, RowLoss, RowStats, Wanted, add_rows_
from grpo_fast.kernels.workspace import on_huge_pages, unset
from grpo_fast.objective.coefficients import RowTerms
from grpo_fast.objective.config import LossConfig


def linear_sweep(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    rows: ActiveRows,
    route: Route,
    **options: Any,
) -> LinearHead | SupportSweep:
    """The sweep of a head over these rows; `options` are those of `LinearHead`."""
    if rows.support is None:
        return LinearHead(hidden, weight, bias, rows, route, **options)
    others, dense, is_wide = rows.support.others, None, options.pop("is_wide", False)
    if others is not None:
        rest = rows.select(others)
        dense = LinearHead(hidden, weight, bias, rest, route, is_wide=True, **options)
    head = GatheredHead(hidden, weight, bias, rows, route, is_wide=is_wide)
    return SupportSweep(head, rows, route, dense)


class SupportSweep:
    """All active rows: those with a support from `source`, the others from `dense`.

    Args:
        source: what gives raw logits in the support, and takes their gradient.
        dense: the sweep over the other rows; None: there are none.
    """

    filtered = None

    def __init__(
        self, source: GatheredHead | GivenLogits, rows: ActiveRows, route: Route, dense: Any
    ) -> None:
        assert rows.support is not None
        self.source, self.dense, self.support = source, dense, rows.support
        self.rule = rows.rule if rows.support.own is None else rows.rule.rows(rows.support.own)
        self.kernels, self.num_rows = route.kernels, rows.target_ids.shape[0]
        self.held: Tensor | None = None  # (nnz,) raw logits

    @property
    def has_entropy_gradient(self) -> bool:
        return self.dense is None or self.dense.has_entropy_gradient

    def logps(self, *, return_entropy: bool, keep: bool = False) -> RowStats:
        """(lse, logps, entropy) of the active rows, (T,) fp32."""
        raw = self.source.logits()
        stats = self.kernels.support.row_logps(
            raw, self.support, self.rule, return_entropy=return_entropy
        )
        self.held = raw if keep else None
        others = (None,) * 3
        if self.dense is not None:
            others = self.dense.logps(return_entropy=return_entropy, keep=keep)
        lse, logps, entropy = (
            None if x is None else self.support.joined(x, y)
            for x, y in zip(stats, others, strict=True)
        )
        assert lse is not None and logps is not None
        return lse, logps, entropy

    def loss_gradients(
        self, terms: RowTerms, config: LossConfig, wanted: Wanted
    ) -> tuple[RowLoss, tuple[Tensor, ...]]:
        """Row losses, and the gradients of a loss whose coefficients follow row by row."""
        stats = self.logps(return_entropy=config.needs_entropy, keep=True)
        losses, g = self.kernels.row_coefficients(stats[1], terms, config)
        return RowLoss(*stats, losses, g), self.gradients(g, terms.grad_entropy, stats, wanted)

    def gradients(
        self, g: Tensor, g_entropy: Tensor | None, known: RowStats, wanted: Wanted
    ) -> tuple[Tensor, ...]:
        """Those of Σ g·logp + g_entropy·entropy, all (T,), after `logps` gave `known`."""
        if not any(wanted):
            return self.source.nothing()
        raw, self.held = self.held, None
        raw = self.source.logits() if raw is None else raw
        others = None
        if self.dense is not None:
            i = self.support.others
            at: RowStats = tuple(None if x is None else x[i] for x in known)  # type: ignore[assignment]
            of_entropy = None if g_entropy is None else g_entropy[i]
            others = self.dense.gradients(g[i], of_entropy, at, wanted)
        own, of_all = self.support, self.support.of_all
        stats: RowStats = tuple(None if x is None else of_all(x) for x in known)  # type: ignore[assignment]
        of_entropy = None if g_entropy is None else of_all(g_entropy)
        d = self.kernels.support.row_grad_(raw, own, stats, of_all(g), of_entropy, self.rule)
        return self.source.gradients(d, wanted, others)


class GatheredHead:
    """Logits of a head in the support: the rows of W that it names, one by one.

    Args: as of `LinearHead`; rows: all active ones.
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
        self.hidden, self.weight, self.bias = hidden, weight, bias
        self.rows: SupportRows = rows.support
        self.doors, self.repeats, self.is_wide = route.kernels.support, rows.repeats, is_wide
        index, own = rows.hidden_index, self.rows.own
        self.index = own if index is None else self.rows.of_all(index)
        self.sum_dtype = torch.promote_types(hidden.dtype, torch.float32)

    def logits(self) -> Tensor:
        """(nnz,) raw logits, fp32 or fp64."""
        return self.doors.head_logits(self.hidden, self.index, self.weight, self.bias, self.rows)

    def nothing(self) -> tuple[Tensor, ...]:
        return (self.hidden.new_empty(0),) * 3

    def gradients(
        self, d: Tensor, wanted: Wanted, others: tuple[Tensor, ...] | None
    ) -> tuple[Tensor, ...]:
        """(dH, dW, db) from d-logits (nnz,), added to those of `others`, in fp32 at least."""
        d_hidden, d_weight, d_bias = self.nothing() if others is None else others
        is_first = others is None
        if wanted.hidden:
            d_hidden = self._hidden(d, None if is_first else d_hidden)
        if wanted.weight:
            if is_first:
                dtype = self.sum_dtype if self.is_wide else self.weight.dtype
                d_weight = unset(self.weight.new_empty, self.weight.shape, dtype=dtype)
                on_huge_pages(d_weight)
            self.doors.head_weight(
                d, self.hidden, self.index, self.rows, d_weight, add=not is_first
            )
        if wanted.bias:
            d_bias = d.new_zeros(len(self.weight)) if is_first else d_bias
            add_rows_(d_bias, self.rows.ids, d)
        found = d_hidden, d_weight, d_bias
        if self.is_wide:
            return found
        likes = self.hidden, self.weight, self.hidden if self.bias is None else self.bias
        return tuple(x.to(like.dtype) for x, like in zip(found, likes, strict=True))

    def _hidden(self, d: Tensor, total: Tensor | None) -> Tensor:
        """(N, H) what d gives, added to `total`."""
        sums = self.doors.head_hidden(d, self.weight, self.rows)
        if total is None and self.index is None:
            return sums
        if total is None:
            total = sums.new_zeros(self.hidden.shape)
        index = torch.arange(len(sums), device=d.device) if self.index is None else self.index
        add_rows_(total, index, sums)
        return total


class GivenLogits:
    """Given logits in the support.

    Args:
        logits: (N, V), rows contiguous.
        out: (N, V) where d-logits go, which may be `logits`; None: fresh memory.
        rows: all active ones.
    """

    def __init__(self, logits: Tensor, out: Tensor | None, rows: ActiveRows) -> None:
        assert rows.support is not None
        self.logit_rows, self.out = logits, out
        support = rows.support
        index = (
            torch.arange(rows.num_rows, device=logits.device) if rows.kept is None else rows.kept
        )
        self.at = support.of_all(index)[support.rows], support.ids

    def logits(self) -> Tensor:
        """(nnz,) raw logits, fp32 or fp64."""
        return self.logit_rows[self.at].to(
            torch.promote_types(self.logit_rows.dtype, torch.float32)
        )

    def nothing(self) -> tuple[Tensor, ...]:
        return (self.logit_rows.new_empty(0),)

    def gradients(
        self, d: Tensor, wanted: Wanted, others: tuple[Tensor, ...] | None
    ) -> tuple[Tensor, ...]:
        """(d-logits,) from those in the support (nnz,), beside the rows of `others`."""
        if others is not None:
            out = others[0]
        elif self.out is not None:
            out = self.out.zero_()
        else:
            out = torch.zeros_like(self.logit_rows, memory_format=torch.contiguous_format)
        out[self.at] = d.to(out.dtype)
        return (out,)
