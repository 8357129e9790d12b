"""The three matrix products of a chunk, and the columns that they may skip.

The dtype and the device determine the GEMM.
"""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_fast.kernels.cpu import gemm
from grpo_fast.kernels.route import uses_csrc_gemm
from grpo_fast.kernels.types import AddedRows, widened

# Number of weight rows that are converted to fp32 at a time, on devices without a GEMM from 16-bit
# inputs to an fp32 output.
WIDEN_ROWS = 16384
# Minimum number of elements for which a GPU's GEMM may write 16-bit output. For a smaller output,
# the vendor's GEMM may split the inner dimension and add partial sums that were already rounded to
# 16 bits. fp32 output avoids this.
NARROW_FROM = 16 << 20
# Number of rows of exponentials that are converted to fp32 at a time, to limit temporary memory.
COLUMN_SUM_ROWS = 64
# Number of rows of d-logits whose masses are computed at a time, to limit temporary memory.
MASS_ROWS = 64


def is_full_precision(x: Tensor) -> bool:
    """Return whether x has at least 32 bits per element."""
    return x.dtype.itemsize >= 4


def matmul_logits(h: Tensor, weight: Tensor, *, out: Tensor) -> None:
    """Compute out (C, V) fp32 = h (C, H) · weight (V, H)ᵀ, with exact products and fp32 sums."""
    if uses_csrc_gemm(h):
        gemm.mm_(h, weight.t(), out)
    elif is_full_precision(h):
        torch.mm(h, weight.t(), out=out)
    elif h.is_cuda:
        torch.mm(h, weight.t(), out_dtype=torch.float32, out=out)
    else:
        h = h.float()
        for v in range(0, weight.shape[0], WIDEN_ROWS):
            matmul_logits(h, weight[v : v + WIDEN_ROWS].float(), out=out[:, v : v + WIDEN_ROWS])


def matmul_d_hidden(d: Tensor, weight: Tensor) -> Tensor:
    """Compute d (C, V) · weight (V, H) in fp32 (fp64 for fp64 inputs).

    `d` is fp32 or has the 16-bit dtype of the weight. If a CPU multiplies in 16 bits, an fp32 `d`
    keeps 16 significant bits. The output is never 16-bit, because a GPU might split the sum over V
    and round each partial sum.
    """
    if uses_csrc_gemm(weight):
        return gemm.product(d, weight, torch.float32, d.shape[:1])
    if is_full_precision(weight):
        return d @ weight
    if weight.is_cuda:
        return torch.mm(d.to(weight.dtype), weight, out_dtype=torch.float32)
    dh = torch.zeros((d.shape[0], weight.shape[1]), dtype=torch.float32, device=d.device)
    for v in range(0, weight.shape[0], WIDEN_ROWS):
        add_product_(dh, d[:, v : v + WIDEN_ROWS].float(), weight[v : v + WIDEN_ROWS].float())
    return dh


def add_product_(total: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Add the matrix product a·b to `total` in place."""
    return gemm.mm_(a, b, total, add=True) if uses_csrc_gemm(b) else total.addmm_(a, b)


def accumulate_outer(
    total: Tensor | None,
    d: Tensor,
    h: Tensor,
    *,
    final: torch.dtype | None = None,
    scales: Tensor | None = None,
    added: AddedRows | None = None,
) -> Tensor:
    """Compute dᵀ (V, C) · h (C, H) in fp32, add it to `total`, and return the sum, (V, H).

    Args:
        total: sum of earlier chunks, or None.
        d: (C, V) d-logits, or exponentials if `scales` is given.
        h: (C, H).
        final: dtype to which the sum may be rounded, because there are no other chunks; None: the
            sum stays in fp32.
        scales: (C,) fp32 factors of the rows of d, or None. A factor of 0 gives exact zeros. Only
            the GEMM of csrc supports them.
        added: rows to add to the sum, or None. Only the GEMM of csrc supports them.
    """
    if uses_csrc_gemm(h):
        # The first chunk overwrites `total`, which is uninitialised. All later chunks are added to
        # it.
        is_new = total is None
        if total is None:
            dtype = torch.bfloat16 if final == torch.bfloat16 else torch.float32
            total = h.new_empty((d.shape[1], h.shape[1]), dtype=dtype)
        return gemm.mm_(d.t(), h, total, add=not is_new, scales=scales, added=added)
    if is_full_precision(h):
        return d.t() @ h if total is None else total.addmm_(d.t(), h)
    if h.is_cuda:
        # If a single GEMM computes dW, let it write 16-bit output: it rounds each fp32 sum only
        # once.
        if total is None and final is not None and d.shape[1] * h.shape[1] >= NARROW_FROM:
            return torch.mm(d.to(h.dtype).t(), h)
        if total is None:
            return torch.mm(d.to(h.dtype).t(), h, out_dtype=torch.float32)
        return torch.addmm(total, d.to(h.dtype).t(), h, out_dtype=torch.float32, out=total)
    d = d.float()
    h = h.float()
    if total is None and final is not None:
        # Round dW in blocks. A whole fp32 dW would take twice the memory of a 16-bit weight.
        total = h.new_empty((d.shape[1], h.shape[1]), dtype=final)
        for v in range(0, d.shape[1], WIDEN_ROWS):
            at = slice(v, v + WIDEN_ROWS)
            total[at] = accumulate_outer(None, d[:, at], h)
        return total
    if total is None:
        total = d.new_zeros((d.shape[1], h.shape[1]))
    return add_product_(total, d.t(), h)


def weighted_column_sum(matrix: Tensor, coefficients: Tensor) -> Tensor:
    """Return Σ_t coefficients[t]·matrix[t] for exponentials (C, V), as (V,) fp32."""
    if not matrix.is_cuda:
        total = coefficients.new_zeros(matrix.shape[1])
        for t in range(0, matrix.shape[0], COLUMN_SUM_ROWS):
            rows = slice(t, t + COLUMN_SUM_ROWS)
            total += coefficients[rows] @ widened(matrix[rows])
        return total
    # Split each fp32 coefficient into a sum of three 16-bit numbers, so that the GEMM has 16-bit
    # operands. fp32 coefficients would need an fp32 copy of the matrix.
    parts = coefficients.new_zeros((coefficients.shape[0], 8), dtype=matrix.dtype)
    left = coefficients
    for i in range(3):
        parts[:, i] = left
        left = left - parts[:, i].float()
    return torch.mm(matrix.t(), parts, out_dtype=torch.float32).sum(1)


def column_masses(d: Tensor, scale: Tensor | None = None) -> Tensor:
    """Return the mass Σ_t |scale_t·d_tj| of every column of d-logits (C, V), as (V,) fp64."""
    masses = torch.zeros(d.shape[1], dtype=torch.float64, device=d.device)
    for start in range(0, d.shape[0], MASS_ROWS):
        block = widened(d[start : start + MASS_ROWS]).abs()
        if scale is not None:
            block = block * scale[start : start + MASS_ROWS, None].abs()
        # Sum in fp32 within a block and in fp64 across blocks.
        masses += block.sum(0, dtype=torch.float32)
    return masses


def heavy_columns(masses: Tensor, tolerance: float) -> tuple[Tensor, Tensor, Tensor]:
    """Select the columns that the filter keeps.

    Args:
        masses: (V,) Σ|d-logits| of each column.
        tolerance: share of the sum of all masses that may be skipped.

    Returns:
        The indices of the kept columns, (n,) in ascending order; the sum of the masses of the
        skipped columns, 0-d; and the sum of all masses, 0-d.
    """
    # If a mass is NaN, the total is NaN, and no column satisfies the comparison below. No column is
    # skipped then, so the NaN stays visible in the gradients.
    lightest, order = masses.sort()
    summed = lightest.cumsum(0)
    total = summed[-1]
    out = int((summed <= tolerance * total).sum())
    dropped = summed[out - 1] if out else torch.zeros_like(total)
    return order[out:].sort().values, dropped, total
