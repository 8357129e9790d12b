"""Accumulation of dH, dW and db from the d-logits of successive chunks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from grpo_fast.kernels.head.grad_filter import WORTH_BELOW, Filtered, column_masses, heavy_columns
from grpo_fast.kernels.head.products import (
    accumulate_outer,
    matmul_d_hidden,
    weighted_column_sum,
    weighted_product,
)
from grpo_fast.kernels.types import (
    AddedRows,
    Coefficients,
    HeadTensors,
    Wanted,
    add_rows_,
    pad_rows,
    padded,
)

# If the share of active rows in a chunk is less than this value, the active rows are moved to the
# front, and the GEMMs read only these rows. With a larger share, the move costs more time than it
# saves.
GATHER_BELOW = 0.9
# The rows are moved in this number of blocks, each through a temporary copy.
GATHER_BLOCKS = 16


class ChunkGradients(NamedTuple):
    """The d-logits of a chunk, or exponentials and the coefficients that convert them to d-logits.

    Exponentials are finite, and 0 in the target column. A row with coefficient 0 has no effect on
    the gradients.
    """

    matrix: Tensor  # (padded C, V)
    coefficients: Coefficients | None = None


@dataclass(eq=False)
class GradientSums:
    """Sums of dH, dW and db over all chunks, in fp32 (fp64 for fp64 inputs).

    Args:
        tensors: hidden, weight and bias.
        wanted: which gradients to compute.
        index: (T,) row of `hidden` that predicts each target; None: row t predicts target t.
        repeats: whether a row of `hidden` may predict several targets; its dH is then a sum.
        is_single_chunk: whether all rows arrive in one call of `add`.
        keep_fp32: return gradients in the dtype of the sums; otherwise in the dtypes of `hidden`,
            weight and bias.
        tolerance: fraction of Σ|d-logits| that may be skipped (grad_filter.py); None: no filter.
        fused_kernels: the module gpu/gradients.py on a GPU, otherwise None.
        sum_hidden: function that sums dH over the ranks of a sharded vocabulary; None: the
            vocabulary is not sharded.
    """

    tensors: HeadTensors
    wanted: Wanted
    _: KW_ONLY
    index: Tensor | None = None
    repeats: bool = False
    is_single_chunk: bool = False
    keep_fp32: bool = False
    tolerance: float | None = None
    fused_kernels: Any = None
    sum_hidden: Callable[[Tensor], Tensor] | None = None
    d_hidden: Tensor | None = field(default=None, init=False)
    d_weight: Tensor | None = field(default=None, init=False)
    d_bias: Tensor | None = field(default=None, init=False)
    filtered: list[Filtered] = field(default_factory=list, init=False)
    # 0-d tensor: NaN if a skipped row has a NaN coefficient, otherwise 0.
    skipped_nan: Tensor | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.hidden, self.weight, self.bias = self.tensors
        self.is_single_chunk = self.is_single_chunk and not self.keep_fp32
        self.sum_dtype = torch.promote_types(self.hidden.dtype, torch.float32)
        # Keep dH in fp32 if more terms will be added to it, so that only the final result is
        # rounded.
        in_parts = self.keep_fp32 or self.repeats or self.sum_hidden is not None
        self.hidden_dtype = self.sum_dtype if in_parts else self.hidden.dtype

    def propagate_nan(self, grad_logps: Tensor, keep: Tensor | None) -> None:
        """Record NaN coefficients of skipped rows, so that `finish` can add them to the gradients.

        The NaN of a skipped row comes from its inputs and must stay visible.
        """
        if keep is not None:
            nan = (0 * grad_logps).sum()
            self.skipped_nan = nan if self.skipped_nan is None else self.skipped_nan + nan

    def add(
        self,
        rows: slice | Tensor,
        h: Tensor,
        d_logits: ChunkGradients,
        count: int,
        keep: Tensor | None,
    ) -> None:
        """Add the gradients of one chunk to the sums.

        Args:
            rows: the chunk's positions among the T active rows.
            h: (padded C, H) rows of `hidden`.
            d_logits: the chunk's d-logits. The matrix may be overwritten.
            count: number of rows that are not padding.
            keep: (n,) indices of the rows with a nonzero coefficient; None: all rows. The d-logits
                of all other rows are exact zeros. If many rows have zeros, the GEMMs skip them.
        """
        has_columns = d_logits.matrix.shape[1] > 0
        if not has_columns or (keep is not None and keep.shape[0] == 0):
            return
        index = rows if self.index is None else self.index[rows]
        d, by = d_logits
        if keep is not None and should_gather(keep, count):
            # 1. Use only the active rows if the smaller GEMMs save more time than the copy costs.
            # On a GPU, one copy of the rows is faster than moving them in blocks.
            h = pad_rows(h.index_select(0, keep))
            d = pad_rows(d.index_select(0, keep)) if d.is_cuda else move_to_front_(d, keep)
            by = None if by is None else by.select(keep)
            index = keep + index.start if isinstance(index, slice) else index[keep]
            count = keep.shape[0]
        if count < d.shape[0]:
            # Set the padding rows to zero. They contain old data from the workspace, and a NaN
            # there would make all of dW NaN.
            d[count:].zero_()
        # 2. Add the chunk to the gradients. It contains exponentials if there are coefficients, and
        # otherwise d-logits.
        if by is None:
            self._add_products(d, h, count, index)
        else:
            self._add_weighted(d, by, h, count, index)

    def _add_products(self, d: Tensor, h: Tensor, count: int, index: slice | Tensor) -> None:
        """Add a chunk of d-logits to the gradients."""
        d, weight, columns = self._filter(d, count, None)
        if self.wanted.hidden:
            self._accumulate_hidden(matmul_d_hidden(d, weight)[:count], index)
        self._accumulate_weight(d, h, columns)
        if self.wanted.bias:
            self._accumulate_bias(d.sum(0, dtype=self.sum_dtype), columns)

    def _add_weighted(
        self, d: Tensor, by: Coefficients, h: Tensor, count: int, index: slice | Tensor
    ) -> None:
        """Add a chunk of exponentials to the gradients.

        The coefficients scale the rows of (C, H) matrices, because scaling the larger matrix of
        exponentials would cost more. The contributions of the targets are added in fp32.
        """
        target = by.by_target[:count]
        d, weight, columns = self._filter(d, count, by)
        # Use the fused kernels only if no column was skipped, because they read all columns.
        fused = columns is None and self.fused_kernels is not None
        if fused:
            self._add_fused(d, by, h, count, index)
        if self.wanted.hidden and not fused:
            added = AddedRows(target, self.weight, rows=by.target_ids)
            if by.rounding_errors is not None:
                errors = by.rounding_errors
                # Drop the rounding errors of skipped columns, which are not part of the product.
                errors = errors if columns is None else errors.of_columns(columns)
                added = errors.added_to(added, by.by_row)
            self._accumulate_hidden(
                weighted_product(d, weight, by.by_row[:count], added, self.hidden_dtype), index
            )
        if self.wanted.weight and not fused:
            self._accumulate_weight(
                d, h, columns, by.by_row, AddedRows(target, h[:count], ids=by.target_ids)
            )
        if self.wanted.bias:
            self._accumulate_bias(weighted_column_sum(d, by.by_row), columns)
            assert self.d_bias is not None
            add_rows_(self.d_bias, by.target_ids, target)

    def _add_fused(
        self, d: Tensor, by: Coefficients, h: Tensor, count: int, index: slice | Tensor
    ) -> None:
        """Add a chunk of exponentials to dH and dW, using GPU kernels."""
        if self.wanted.hidden:
            product = matmul_d_hidden(d, self.weight)
            out = torch.empty_like(product[:count], dtype=self.hidden_dtype)
            self.fused_kernels.write_hidden_(out, product, *by[:3], self.weight)
            del product  # free its memory before dW is computed
            self._accumulate_hidden(out, index)
        if self.wanted.weight:
            scaled = self.fused_kernels.scaled_hidden(h, by.by_row, h.dtype)
            # Sort stably, so that the rows of an id stay in order. The sum is then reproducible.
            # Sort int32, which takes a GPU half as long as int64.
            ids, order = by.target_ids.to(torch.int32).sort(stable=True)
            total = accumulate_outer(
                self.d_weight, d, scaled, self.weight, is_single_chunk=self.is_single_chunk
            )
            self.fused_kernels.add_targets_(total, ids, order, by.by_target, h, d, scaled)
            self.d_weight = total

    def _new_hidden(self) -> Tensor:
        return self.hidden.new_zeros(self.hidden.shape, dtype=self.hidden_dtype)

    def _filter(
        self, d: Tensor, count: int, by: Coefficients | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Drop the columns of d with a small mass Σ|d-logits|, and the corresponding rows of W.

        Returns:
            The remaining columns of d, the remaining rows of W, and the vocabulary ids of these
            columns. The ids are None if nothing was dropped.
        """
        if self.tolerance is None:
            return d, self.weight, None
        vocab = self.weight.shape[0]
        masses = column_masses(d[:count], None if by is None else by.by_row[:count])
        columns, dropped, total = heavy_columns(masses, self.tolerance)
        if by is not None:
            # Add the absolute target terms to the total, because the matrix contains 0 in the
            # targets' columns.
            total = total + by.by_target[:count].abs().sum(dtype=torch.float64)
        kept = columns.shape[0]
        # Keep all columns if the filter would skip too few of them to save time.
        if kept >= WORTH_BELOW * vocab:
            kept = vocab
            dropped = torch.zeros_like(total)
        self.filtered.append(Filtered(dropped, total, count * kept, count * vocab))
        if kept == vocab:
            return d, self.weight, None
        return d.index_select(1, columns), self.weight.index_select(0, columns), columns

    def _accumulate_hidden(self, dh: Tensor, index: slice | Tensor) -> None:
        """Write dH of some rows into the full dH, or add it if rows of `hidden` repeat."""
        # If one chunk contains all rows in order, its dH is the full dH.
        if dh.shape[0] == self.hidden.shape[0] and isinstance(index, slice):
            self.d_hidden = dh.to(self.hidden_dtype)
            return
        if self.d_hidden is None:
            self.d_hidden = self._new_hidden()
        if self.repeats:
            assert isinstance(index, Tensor)
            add_rows_(self.d_hidden, index, dh.to(self.hidden_dtype))
        else:
            self.d_hidden[index] = dh.to(self.hidden_dtype)

    def _accumulate_weight(
        self,
        d: Tensor,
        h: Tensor,
        columns: Tensor | None,
        scales: Tensor | None = None,
        added: AddedRows | None = None,
    ) -> None:
        """Add dᵀ·diag(scales)·h and `added` to dW.

        `columns` are the vocabulary ids of the columns of d, without duplicates; None: all ids.
        """
        if not self.wanted.weight:
            return
        if columns is None:
            self.d_weight = accumulate_outer(
                self.d_weight, d, h, self.weight, is_single_chunk=self.is_single_chunk,
                scales=scales, added=added,
            )  # fmt: skip
            return
        if self.d_weight is None:
            self.d_weight = d.new_zeros(self.weight.shape, dtype=self.sum_dtype)
        own = h.new_empty((columns.shape[0], h.shape[1]), dtype=self.sum_dtype)
        self.d_weight.index_add_(
            0, columns, accumulate_outer(None, d, h, own, is_single_chunk=True, scales=scales)
        )
        if added is not None:
            added.add_to_(self.d_weight)

    def _accumulate_bias(self, db: Tensor, columns: Tensor | None) -> None:
        """Add the bias gradient of some columns to the sum. `columns` is None for all columns."""
        if columns is not None:
            db = db.new_zeros(self.weight.shape[0]).index_copy_(0, columns, db)
        self.d_bias = db if self.d_bias is None else self.d_bias + db

    def finish(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return contiguous (dH, dW, db). A gradient that was not requested is empty."""
        if self.sum_hidden is not None and self.wanted.hidden:
            d_hidden = self._new_hidden() if self.d_hidden is None else self.d_hidden
            self.d_hidden = self.sum_hidden(d_hidden)
        results = []
        sums = (self.d_hidden, self.d_weight, self.d_bias)
        for sum_, like, is_wanted in zip(sums, self.tensors, self.wanted, strict=True):
            if not is_wanted or like is None:
                results.append(self.hidden.new_empty(0))
                continue
            dtype = self.sum_dtype if self.keep_fp32 else like.dtype
            if sum_ is None:
                sum_ = torch.zeros(like.shape, dtype=dtype, device=like.device)
            results.append(sum_.to(dtype))
            if self.skipped_nan is not None:
                # Add 0, or a NaN that makes a NaN in a skipped row visible.
                results[-1].view(-1)[:1] += self.skipped_nan
        return results[0], results[1], results[2]


def move_to_front_(x: Tensor, keep: Tensor) -> Tensor:
    """Move the rows `keep` of x to the front, in place.

    Args:
        x: the matrix, whose number of rows is a multiple of ROW_MULTIPLE.
        keep: (n,) indices of rows, in ascending order.

    Returns:
        The first rows of x. Their number is n, rounded up to a multiple of ROW_MULTIPLE.
    """
    # A block is written to rows that no later block reads, because keep[i] >= i.
    size = padded(-(-keep.shape[0] // GATHER_BLOCKS))
    for block, index in enumerate(keep.split(size)):
        x[block * size :][: len(index)] = x.index_select(0, index)
    return x[: padded(keep.shape[0])]


def should_gather(keep: Tensor, count: int) -> bool:
    """Return whether copying the active rows (`keep`, of `count` rows) saves time."""
    return keep.shape[0] < GATHER_BELOW * count
