"""Sums of dH, dW and db over the chunks of all sources.

This module is the only place that multiplies d-logits by hidden states or by the weight. The sums
are fp32 (fp64 for fp64 inputs) and are rounded once, in `HeadSums.finish`.

With a `tolerance`, the sums skip vocabulary columns with a small share of the gradient, which is an
approximation. In a chunk's d-logits d (C, V), column j has the mass m_j = Σ_t |d_tj|. The columns
with the smallest masses are skipped as long as the sum of their masses, δ, is at most
`tolerance`·Σ_j m_j. The errors are bounded:

    ‖ΔdH‖_F ≤ δ · max_j ‖W_j‖        ‖ΔdW‖_F ≤ δ · max_t ‖h_t‖        |Δdb|₁ ≤ δ

The dH of a row then depends on the chunk that contains the row.

fp16 gradients need another precaution. In a large batch, a token has a weight of about 1e-5, and
its d-logits are even smaller. Many of them would be rounded to 0, because the smallest positive
fp16 number is 6e-8. Therefore the token weights are first scaled by a power of two, the
`weight_unit`, so that the largest weight is about 1. `narrowed` then scales each summed gradient by
a second power of two, so that its largest element is near 2^13, and rounds it to fp16 once. The
backward pass multiplies the gradients by upstream·unit, which undoes the scaling. Scaling by powers
of two is exact. bf16 has the range of fp32 and does not need this.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from grpo_fast.kernels.cpu import gemm
from grpo_fast.kernels.head import products
from grpo_fast.kernels.types import (
    AddedRows,
    Coefficients,
    HeadTensors,
    SupportRows,
    Wanted,
    add_rows_,
    pad_rows,
    padded,
    scaled_rows,
)
from grpo_fast.kernels.workspace import zeros

# If the share of active rows in a chunk is less than this value, the active rows are moved to the
# front, and the GEMMs read only these rows. With a larger share, the move costs more time than it
# saves.
GATHER_BELOW = 0.9
# The rows are moved in this number of blocks, each through a temporary copy.
GATHER_BLOCKS = 16
# Skip columns only if the share of the kept columns is less than this value. Otherwise, gathering
# the kept columns costs more time than the smaller GEMMs save.
WORTH_BELOW = 0.6
# Exponent that bounds stored fp16 gradients: they are scaled so that their largest element is less
# than 2^13. This leaves a factor of 8 below the fp16 maximum (2^16).
TOP_EXPONENT = 13


class ChunkGradients(NamedTuple):
    """The d-logits of a chunk, or exponentials and the coefficients that convert them to d-logits.

    Exponentials are finite, and 0 in the target column. A row with coefficient 0 has no effect on
    the gradients.
    """

    matrix: Tensor  # (padded C, V); token sets: (nnz,) d-logits of all sets
    coefficients: Coefficients | None = None
    # (R, H) and (R,) of R token sets, with dH = slopes·g; None: dH is computed from the matrix
    slopes: tuple[Tensor, Tensor] | None = None


class HeadSums:
    """Sums of dH, dW and db of an LM head.

    Args:
        tensors: hidden, weight and bias.
        wanted: which gradients to compute.
        kernels: the module gpu/gradients.py on a GPU, otherwise None.
        repeats: whether a row of `hidden` may predict several targets; its dH is then a sum.
        is_single_chunk: whether all rows arrive in one call of `add`.
        in_parts: sum dH and dW in fp32 even if a single chunk could be rounded, because more terms
            follow, or because the result stays in fp32.
        keep_fp32: return gradients in the dtype of the sums; otherwise in the dtypes of `hidden`,
            weight and bias.
        tolerance: fraction of Σ|d-logits| that may be skipped; None: nothing is skipped.
        sum_hidden: function that sums dH over the ranks of a sharded vocabulary; None: the
            vocabulary is not sharded.
    """

    def __init__(
        self,
        tensors: HeadTensors,
        wanted: Wanted,
        kernels: Any = None,
        *,
        repeats: bool = False,
        is_single_chunk: bool = False,
        in_parts: bool = False,
        keep_fp32: bool = False,
        tolerance: float | None = None,
        sum_hidden: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self.tensors = tensors
        self.hidden, self.weight, self.bias = tensors
        self.wanted = wanted
        self.kernels = kernels
        self.repeats = repeats
        self.keep_fp32 = keep_fp32
        self.in_parts = in_parts or keep_fp32
        # The dtype to which dW may be rounded at once; None: it is a sum of several terms.
        self.final = self.weight.dtype if is_single_chunk and not self.in_parts else None
        self.tolerance = tolerance
        self.sum_hidden = sum_hidden
        self.dtype = torch.promote_types(self.hidden.dtype, torch.float32)
        # Keep dH in fp32 if more terms will be added to it, so that only the final result is
        # rounded.
        stays = self.in_parts or self.repeats or sum_hidden is not None
        self.hidden_dtype = self.dtype if stays else self.hidden.dtype
        self.d_hidden: Tensor | None = None
        self.d_weight: Tensor | None = None
        self.d_bias: Tensor | None = None
        # 0-d tensor: NaN if a skipped row has a NaN coefficient, otherwise 0.
        self.skipped_nan: Tensor | None = None
        # Per chunk: the skipped mass, the mass of all columns (0-d fp64 each), the number of
        # elements in the kept columns, and the number of all elements.
        self.filtered: list[tuple[Tensor, Tensor, int, int]] = []

    def propagate_nan(self, grad_logps: Tensor) -> None:
        """Record NaN coefficients of skipped rows, so that `finish` can add them to the gradients.

        The NaN of a skipped row comes from its inputs and must stay visible.
        """
        nan = (0 * grad_logps).sum()
        self.skipped_nan = nan if self.skipped_nan is None else self.skipped_nan + nan

    def add(
        self, rows: slice | Tensor, h: Tensor, part: ChunkGradients, count: int, keep: Tensor | None
    ) -> None:
        """Add the gradients of one chunk to the sums.

        Args:
            rows: the rows of `hidden` that predict the targets of the chunk.
            h: (padded C, H) these rows.
            part: the chunk's d-logits. The matrix may be overwritten.
            count: number of rows that are not padding.
            keep: (n,) indices of the rows with a nonzero coefficient; None: all rows. The d-logits
                of all other rows are exact zeros. If many rows have zeros, the GEMMs skip them.
        """
        has_columns = part.matrix.shape[1] > 0
        if not has_columns or (keep is not None and keep.shape[0] == 0):
            return
        d, by, _ = part
        if keep is not None and should_gather(keep, count):
            # 1. Use only the active rows if the smaller GEMMs save more time than the copy costs.
            # On a GPU, one copy of the rows is faster than moving them in blocks.
            h = pad_rows(h.index_select(0, keep))
            d = pad_rows(d.index_select(0, keep)) if d.is_cuda else move_to_front_(d, keep)
            by = None if by is None else by.select(keep)
            rows = keep + rows.start if isinstance(rows, slice) else rows[keep]
            count = keep.shape[0]
        if count < d.shape[0]:
            # Set the padding rows to zero. They contain old data from the workspace, and a NaN
            # there would make all of dW NaN.
            d[count:].zero_()
        # 2. Add the chunk to the gradients. It contains exponentials if there are coefficients, and
        # otherwise d-logits.
        d, weight, columns = self._filter(d, count, by)
        if by is None:
            if self.wanted.hidden:
                self._add_hidden(products.matmul_d_hidden(d, weight)[:count], rows)
            if self.wanted.weight:
                self._add_weight(d, h, columns)
            if self.wanted.bias:
                self._add_bias(d.sum(0, dtype=self.dtype), columns)
            return
        self._add_exponentials(d, by, h, count, rows, weight, columns)
        if self.wanted.bias:
            self._add_bias(products.weighted_column_sum(d, by.by_row), columns)
            assert self.d_bias is not None
            add_rows_(self.d_bias, by.target_ids, by.by_target[:count])

    def _add_exponentials(
        self,
        d: Tensor,
        by: Coefficients,
        h: Tensor,
        count: int,
        rows: slice | Tensor,
        weight: Tensor,
        columns: Tensor | None,
    ) -> None:
        """Add a chunk of exponentials to dH and dW, on a GPU or with the products of csrc.

        The coefficients scale the rows of (C, H) matrices, because scaling the larger matrix of
        exponentials would cost more. The contributions of the targets are added in fp32.
        """
        scaled: Tensor | None = None
        # 1. Compute dH. The weight rows of the targets are added to the product before it is
        # rounded.
        if self.wanted.hidden:
            dh = weight.new_empty((count, weight.shape[1]), dtype=self.hidden_dtype)
            if self.kernels is None:
                added = AddedRows(by.by_target[:count], self.weight, rows=by.target_ids)
                errors = by.rounding_errors
                if errors is not None:
                    # Drop the rounding errors of skipped columns, which are not part of the
                    # product.
                    errors = errors if columns is None else errors.of_columns(columns)
                    added = errors.added_to(added, by.by_row)
                gemm.mm_(d[:count], weight, dh, out_scales=by.by_row[:count], added=added)
            else:
                product = products.matmul_d_hidden(d, weight)
                scaled = self.kernels.write_hidden_(
                    dh, product, by.by_row, by.by_target, by.target_ids, self.weight,
                    h if self.wanted.weight else None,
                )  # fmt: skip
                del product  # free its memory before dW is computed
            self._add_hidden(dh, rows)
        # 2. Compute dW, and add the hidden states of the targets.
        if self.wanted.weight and self.kernels is None:
            added = AddedRows(by.by_target[:count], h[:count], ids=by.target_ids)
            self._add_weight(d, h, columns, by.by_row, added)
        elif self.wanted.weight:
            if scaled is None:
                scaled = self.kernels.scaled_hidden(h, by.by_row, h.dtype)
            # Add the rows of an id in order, so that the sum is reproducible.
            ids, order = self.kernels.sorted_targets(by.target_ids)
            self._add_weight(d, scaled, columns)
            self.kernels.add_targets_(self.d_weight, ids, order, by.by_target, h, d, scaled)

    def add_sets(self, d_logits: ChunkGradients, support: SupportRows, kernels: Any) -> None:
        """Add the gradients of the rows that have a token set.

        Args:
            d_logits: the d-logits of all sets, and the slopes, if the forward pass computed them.
            support: the token sets.
            kernels: the backend's module of kernels for token sets.
        """
        d, _, slopes = d_logits
        if self.wanted.hidden:
            if slopes is None:
                dh = kernels.head_hidden(d, self.weight, support)
            elif self.kernels is None:
                dh = scaled_rows(*slopes)
            else:
                dh = self.kernels.scaled_hidden(*slopes, self.hidden_dtype)
            rows = support.hidden_index
            self._add_hidden(dh, slice(0, len(dh)) if rows is None else rows)
        if self.wanted.weight:
            is_first = self.d_weight is None
            if self.d_weight is None:
                # On a CPU, use fresh memory pages, which already contain zeros. The kernel then
                # adds, and writes only the rows of tokens that are in a set.
                dtype = self.dtype if self.in_parts else self.weight.dtype
                new = zeros if self.weight.is_cpu else self.weight.new_empty
                self.d_weight = new(self.weight.shape, dtype=dtype)
            adds = self.weight.is_cpu or not is_first
            kernels.head_weight(d, self.hidden, support, self.d_weight, add=adds)
        if self.wanted.bias:
            if self.d_bias is None:
                self.d_bias = d.new_zeros(len(self.weight))
            add_rows_(self.d_bias, support.ids, d)

    def _add_hidden(self, dh: Tensor, rows: slice | Tensor) -> None:
        """Write dH of some rows into the full dH, or add it if rows of `hidden` repeat."""
        # If one chunk contains all rows in order, its dH is the full dH.
        is_all = dh.shape[0] == self.hidden.shape[0] and isinstance(rows, slice)
        if is_all and self.d_hidden is None:
            self.d_hidden = dh.to(self.hidden_dtype)
            return
        if self.d_hidden is None:
            self.d_hidden = self.hidden.new_zeros(self.hidden.shape, dtype=self.hidden_dtype)
        if self.repeats and isinstance(rows, Tensor):
            add_rows_(self.d_hidden, rows, dh.to(self.hidden_dtype))
        elif self.repeats:
            self.d_hidden[rows] += dh.to(self.hidden_dtype)
        else:
            self.d_hidden[rows] = dh.to(self.hidden_dtype)

    def _add_weight(
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
        if columns is None:
            self.d_weight = products.accumulate_outer(
                self.d_weight, d, h, final=self.final, scales=scales, added=added
            )
            return
        if self.d_weight is None:
            self.d_weight = d.new_zeros(self.weight.shape, dtype=self.dtype)
        self.d_weight.index_add_(0, columns, products.accumulate_outer(None, d, h, scales=scales))
        if added is not None:
            assert added.ids is not None
            add_rows_(self.d_weight, added.ids, scaled_rows(added.values, added.coefficients))

    def _add_bias(self, db: Tensor, columns: Tensor | None) -> None:
        """Add the bias gradient of some columns to the sum. `columns` is None for all columns."""
        if columns is not None:
            db = db.new_zeros(self.weight.shape[0]).index_copy_(0, columns, db)
        self.d_bias = db if self.d_bias is None else self.d_bias + db

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
        masses = products.column_masses(d[:count], None if by is None else by.by_row[:count])
        columns, dropped, total = products.heavy_columns(masses, self.tolerance)
        if by is not None:
            # Add the absolute target terms to the total, because the matrix contains 0 in the
            # targets' columns.
            total = total + by.by_target[:count].abs().sum(dtype=torch.float64)
        kept = columns.shape[0]
        # Keep all columns if the filter would skip too few of them to save time.
        if kept >= WORTH_BELOW * vocab:
            kept = vocab
            dropped = torch.zeros_like(total)
        self.filtered.append((dropped, total, count * kept, count * vocab))
        if kept == vocab:
            return d, self.weight, None
        return d.index_select(1, columns), self.weight.index_select(0, columns), columns

    def filtered_shares(self) -> Tensor | None:
        """Return two shares over all chunks, (2,) fp32, or None without a tolerance.

        The first is the share of Σ|d-logits| that was skipped. The second is the share of the
        columns that were kept.
        """
        if self.tolerance is None:
            return None
        nothing = torch.zeros((), dtype=torch.float64, device=self.hidden.device)
        chunks = [(nothing, nothing, 0, 0), *self.filtered]
        dropped, total, kept, elements = (sum(x) for x in zip(*chunks, strict=True))
        stayed = kept / elements if elements else 1.0
        share = dropped / total.clamp(min=torch.finfo(torch.float64).tiny)
        return torch.stack([share, torch.full_like(share, stayed)]).float()

    def finish(self) -> tuple[Tensor, ...]:
        """Return contiguous (dH, dW, db). A gradient that was not requested is empty."""
        if self.sum_hidden is not None and self.wanted.hidden:
            if self.d_hidden is None:
                self.d_hidden = self.hidden.new_zeros(self.hidden.shape, dtype=self.hidden_dtype)
            self.d_hidden = self.sum_hidden(self.d_hidden)
        results = []
        sums = (self.d_hidden, self.d_weight, self.d_bias)
        for sum_, like, is_wanted in zip(sums, self.tensors, self.wanted, strict=True):
            if not is_wanted or like is None:
                results.append(torch.empty(0))
                continue
            dtype = self.dtype if self.keep_fp32 else like.dtype
            if sum_ is None:
                sum_ = torch.zeros(like.shape, dtype=dtype, device=like.device)
            results.append(sum_ if sum_.dtype == dtype else sum_.to(dtype))
            if self.skipped_nan is not None:
                # Add 0, or a NaN that makes a NaN in a skipped row visible.
                results[-1].view(-1)[:1] += self.skipped_nan
        return tuple(results)


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


def weight_unit(weights: Tensor) -> Tensor:
    """Return the power of two that scales the largest weight into [0.5, 1), as 0-d fp32."""
    return power_of_two(-largest_exponent(weights))


def narrowed(gradient: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Scale a gradient into the range of `dtype`, and round it once.

    Returns:
        A pair (stored, unit), with gradient = stored·unit. `stored` has the given dtype, and `unit`
        is a power of two (0-d fp32). The contents of `gradient` are overwritten.
    """
    exponent = largest_exponent(gradient) - TOP_EXPONENT
    return gradient.mul_(power_of_two(-exponent)).to(dtype), power_of_two(exponent)


def largest_exponent(x: Tensor) -> Tensor:
    """Return the exponent e with 2^(e-1) <= max |x| < 2^e, as a 0-d int32 tensor.

    The exponent is clamped so that 2^e and 2^-e are normal numbers. It is 0 if all elements are 0.
    """
    if not x.numel():
        return torch.zeros((), dtype=torch.int32, device=x.device)
    # Use aminmax, which needs one pass and no temporary tensor. x.abs().max() would need both.
    low, high = x.aminmax()
    return torch.frexp(torch.maximum(-low, high)).exponent.clamp(-100, 100)


def power_of_two(exponent: Tensor) -> Tensor:
    """Return 2^exponent as an fp32 tensor, for int32 exponents from -126 to 127."""
    # Build the bits of the float from its biased exponent, because torch.ldexp is not exact on a
    # GPU.
    return ((exponent + 127) << 23).view(torch.float32)
