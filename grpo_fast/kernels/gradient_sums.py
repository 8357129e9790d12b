"""dH, dW and db from the d-logits of one chunk after another, by the vendor's GEMMs (products.py)."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from grpo_fast.kernels.added_rows import AddedRows, add_rows_
from grpo_fast.kernels.dominant_weights import DominantWeights
from grpo_fast.kernels.grad_filter import WORTH_BELOW, column_masses, heavy_columns
from grpo_fast.kernels.products import accumulate_outer, matmul_narrow, weighted_column_sum, weighted_product

if TYPE_CHECKING:
    from grpo_fast.kernels.linear import LinearHead

# Rows per GEMM are a multiple of this: below 8 rows MKL takes another kernel, with another order of summation.
ROW_MULTIPLE = 32
# Gather the active rows of a chunk before the gradient GEMMs when fewer than this fraction of them are active.
GATHER_BELOW = 0.9


class Wanted(NamedTuple):
    """Which gradients somebody will read."""

    hidden: bool
    weight: bool
    bias: bool


class RowCoefficients(NamedTuple):
    """What turns a matrix of weights into d-logits: weights[:, None]·matrix, and `target` in the targets' columns."""

    weights: Tensor  # (padded C,) fp32
    target: Tensor  # (padded C,) fp32
    target_ids: Tensor  # (C,)
    rest: DominantWeights | None = None  # of weights that the product rounds

    def select(self, rows: Tensor) -> RowCoefficients:
        """Those of some rows, padded again."""
        weights, target = (pad_rows(x.index_select(0, rows)) for x in self[:2])
        rest = None if self.rest is None else self.rest.of_rows(rows, len(self.target_ids))
        return RowCoefficients(weights, target, self.target_ids.index_select(0, rows), rest)


class ChunkGradients(NamedTuple):
    """d-logits of a chunk: the matrix itself, or with coefficients a matrix of weights.

    Weights are finite in every row and 0 in the target's column; a row whose coefficients are 0 counts as exact zeros.
    """

    matrix: Tensor  # (padded C, V)
    coefficients: RowCoefficients | None = None


class GradientSums:
    """dH by rows, dW and db in fp32 over the chunks of a `LinearHead`."""

    def __init__(self, head: LinearHead, wanted: Wanted) -> None:
        self.head, self.wanted = head, wanted
        self.d_hidden: Tensor | None = None
        self.d_weight: Tensor | None = None
        self.d_bias: Tensor | None = None

    def add(self, rows: slice | Tensor, h: Tensor, d_logits: ChunkGradients, count: int, keep: Tensor | None) -> None:
        """Add one chunk.

        Args:
            rows: the chunk among the T active rows.
            h: (padded C, H) its hidden rows.
            d_logits: its d-logits.
            count: C, the rows that are no padding.
            keep: those with a coefficient, None for all; the others are exact zeros, left out of every GEMM when they
                are many.
        """
        if keep is not None and keep.shape[0] == 0:
            return
        index = rows if self.head.index is None else self.head.index[rows]
        d, coefficients = d_logits
        if keep is not None and gathers(keep, count):
            h, d = (pad_rows(x.index_select(0, keep)) for x in (h, d))
            coefficients = None if coefficients is None else coefficients.select(keep)
            index, count = keep + index.start if isinstance(index, slice) else index[keep], keep.shape[0]
        elif count < d.shape[0]:
            d[count:].zero_()
        if coefficients is None:
            self._add_products(d, h, count, index)
        else:
            self._add_weighted(d, coefficients, h, count, index)

    def _add_products(self, d: Tensor, h: Tensor, count: int, index: slice | Tensor) -> None:
        d, weight, columns = self._filter(d, count, None)
        if self.wanted.hidden:
            self._keep_hidden(matmul_narrow(d, weight, wide=self.head.wide_gradients)[:count], index)
        self._keep_weight(d, h, columns, is_only=self.head.is_single_chunk and not self.head.wide_gradients)
        if self.wanted.bias:
            self._keep_bias(d.sum(0, dtype=self.head.compute_dtype), columns)

    def _add_weighted(self, d: Tensor, by: RowCoefficients, h: Tensor, count: int, index: slice | Tensor) -> None:
        """Row coefficients multiply (C, H) matrices; the target's column is added in fp32, equal ids in their order."""
        target = by.target[:count]
        d, weight, columns = self._filter(d, count, by)
        if self.wanted.hidden:
            added = AddedRows(target, self.head.weight, rows=by.target_ids)
            dtype = self.head.compute_dtype if self.head.rows_repeat else self.head.gradient_dtype(self.head.hidden)
            if by.rest is not None:
                rest = by.rest if columns is None else by.rest.of_columns(columns)
                added = rest.added_to(added, by.weights)
            self._keep_hidden(weighted_product(d, weight, by.weights[:count], added, dtype), index)
        if self.wanted.weight:
            added = AddedRows(target, h[:count], ids=by.target_ids)
            self._keep_weight(d, h, columns, is_only=self.head.is_single_chunk, scales=by.weights, added=added)
        if self.wanted.bias:
            self._keep_bias(weighted_column_sum(d, by.weights), columns)
            assert self.d_bias is not None
            add_rows_(self.d_bias, by.target_ids, target)

    def _filter(self, d: Tensor, count: int, by: RowCoefficients | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """d, W and the columns that `grad_filter` leaves of both; None for all. Targets of weights always stay."""
        head = self.head
        if head.grad_filter is None or head.filtered is None:
            return d, head.weight, None
        masses = column_masses(d[:count], None if by is None else by.weights[:count])
        columns, dropped, total = heavy_columns(masses, head.grad_filter)
        if by is not None:
            total = total + by.target[:count].abs().sum(dtype=torch.float64)
        kept = columns.shape[0]
        if kept >= WORTH_BELOW * head.vocab_size:
            head.filtered = head.filtered.add(0.0, total, count, head.vocab_size, head.vocab_size)
            return d, head.weight, None
        head.filtered = head.filtered.add(dropped, total, count, kept, head.vocab_size)
        return d.index_select(1, columns), head.weight.index_select(0, columns), columns

    def _keep_hidden(self, dh: Tensor, index: slice | Tensor) -> None:
        hidden, dtype = self.head.hidden, self.head.gradient_dtype(self.head.hidden)
        if self.head.rows_repeat:
            assert isinstance(index, Tensor)
            if self.d_hidden is None:
                self.d_hidden = torch.zeros(hidden.shape, dtype=self.head.compute_dtype, device=hidden.device)
            add_rows_(self.d_hidden, index, dh.to(self.d_hidden.dtype))
        elif dh.shape[0] == hidden.shape[0] and isinstance(index, slice):
            self.d_hidden = dh.to(dtype)
        else:
            if self.d_hidden is None:
                self.d_hidden = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
            self.d_hidden[index] = dh.to(dtype)

    def _keep_weight(
        self,
        d: Tensor,
        h: Tensor,
        columns: Tensor | None,
        *,
        is_only: bool,
        scales: Tensor | None = None,
        added: AddedRows | None = None,
    ) -> None:
        """dW += dᵀ·diag(scales)·h, and `added`; every column of `columns` occurs once: no order is in question."""
        if not self.wanted.weight:
            return
        if columns is None:
            weight = self.head.weight
            self.d_weight = accumulate_outer(self.d_weight, d, h, weight, is_only=is_only, scales=scales, added=added)
            return
        dtype = self.head.compute_dtype
        if self.d_weight is None:
            self.d_weight = d.new_zeros(self.head.weight.shape, dtype=dtype)
        own = h.new_empty((columns.shape[0], h.shape[1]), dtype=dtype)
        self.d_weight.index_add_(0, columns, accumulate_outer(None, d, h, own, is_only=True, scales=scales))
        if added is not None:
            added.add_to_(self.d_weight)

    def _keep_bias(self, db: Tensor, columns: Tensor | None) -> None:
        if columns is not None:
            db = db.new_zeros(self.head.vocab_size).index_copy_(0, columns, db)
        self.d_bias = db if self.d_bias is None else self.d_bias + db

    def finish(self) -> tuple[Tensor, Tensor, Tensor]:
        """(dH, dW, db), contiguous, in the dtypes that `head.gradient_dtype` gives; empty where none was wanted."""
        head = self.head
        results = []
        for sum_, like, is_wanted in (
            (self.d_hidden, head.hidden, self.wanted.hidden),
            (self.d_weight, head.weight, self.wanted.weight),
            (self.d_bias, head.bias, self.wanted.bias),
        ):
            if not is_wanted:
                results.append(head.hidden.new_empty(0))
            elif sum_ is None:
                results.append(torch.zeros(like.shape, dtype=head.gradient_dtype(like), device=like.device))
            else:
                results.append(sum_.to(head.gradient_dtype(like)))
        return results[0], results[1], results[2]


def gathers(keep: Tensor, count: int) -> bool:
    """Whether so few of `count` rows are kept that copying them beats multiplying zeros."""
    return keep.shape[0] < GATHER_BELOW * count


def padded(count: int) -> int:
    """The next multiple of ROW_MULTIPLE."""
    return -(-count // ROW_MULTIPLE) * ROW_MULTIPLE


def pad_rows(x: Tensor) -> Tensor:
    """(C, …) → (padded C, …), zeros added."""
    missing = padded(x.shape[0]) - x.shape[0]
    return torch.nn.functional.pad(x, (0, 0) * (x.dim() - 1) + (0, missing)) if missing else x
