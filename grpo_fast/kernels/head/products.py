"""The three matrix products of a chunk: whose GEMM, for each dtype and device."""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_fast.kernels.cpu import gemm
from grpo_fast.kernels.route import uses_csrc_gemm
from grpo_fast.kernels.types import POSITIVE16, AddedRows, scaled_rows, widened

# Vocabulary rows widened to fp32 at a time, where there is no 16-bit GEMM with fp32 output.
WIDEN_ROWS = 16384
# A GPU's GEMM writes a sum of this many elements in 16 bits at once. A smaller one it may split
# over the inner dimension, and then adds parts that were rounded: such a sum leaves it in fp32.
NARROW_FROM = 16 << 20
# Rows of a matrix of exponentials that are widened at a time.
COLUMN_SUM_ROWS = 64


def is_full_precision(x: Tensor) -> bool:
    return x.dtype.itemsize >= 4


def matmul_logits(h: Tensor, weight: Tensor, *, out: Tensor) -> None:
    """out (C, V) fp32 = h (C, H) · weight (V, H)ᵀ: exact products, sums in fp32."""
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
    """(C, H) = d (C, V) · weight (V, H), summed and left in fp32 (fp64 for fp64).

    d is fp32, or has the weight's 16 bits already. An fp32 d that a CPU multiplies in 16 bits keeps
    16 digits. A GPU that may write 16 bits may split the sum over V and round its parts.
    """
    if uses_csrc_gemm(weight):
        out = d.new_empty((d.shape[0], weight.shape[1]), dtype=torch.float32)
        return gemm.mm_(d, weight, out)
    if is_full_precision(weight):
        return d @ weight
    if weight.is_cuda:
        return torch.mm(d.to(weight.dtype), weight, out_dtype=torch.float32)
    dh = torch.zeros((d.shape[0], weight.shape[1]), dtype=torch.float32, device=d.device)
    for v in range(0, weight.shape[0], WIDEN_ROWS):
        add_product_(dh, d[:, v : v + WIDEN_ROWS].float(), weight[v : v + WIDEN_ROWS].float())
    return dh


def weighted_product(
    matrix: Tensor, weight: Tensor, scales: Tensor, added: AddedRows, dtype: torch.dtype
) -> Tensor:
    """(C, H) = diag(scales)·matrix · weight + added: summed in fp32, rounded to `dtype` once.

    `matrix`: (padded C, V), in the 16 bits of `weight` (V, H), fp32 or POSITIVE16; rounded to those
    16 bits where the product takes such.
    """
    count = scales.shape[0]
    if uses_csrc_gemm(weight):
        out = weight.new_empty((count, weight.shape[1]), dtype=dtype)
        return gemm.mm_(matrix[:count], weight, out, out_scales=scales, added=added)
    product = scaled_rows(matmul_d_hidden(matrix, weight)[:count], scales)
    return (product + added.terms()).to(dtype)


def add_product_(total: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return gemm.mm_(a, b, total, add=True) if uses_csrc_gemm(b) else total.addmm_(a, b)


def accumulate_outer(
    total: Tensor | None,
    d: Tensor,
    h: Tensor,
    weight: Tensor,
    *,
    is_single_chunk: bool,
    scales: Tensor | None = None,
    added: AddedRows | None = None,
) -> Tensor:
    """total (V, H) fp32 += dᵀ (V, C) · h (C, H). An only chunk goes straight to the weight's dtype.

    `scales` (C,) fp32: the rows of d are exponentials, to be multiplied by these (exact zeros where
    they are 0). `added`: rows that the sum gets on top.
    """
    is_own = uses_csrc_gemm(h)
    if scales is not None and not (is_own and d.dtype in (torch.float32, POSITIVE16)):
        h = scaled_rows(h, scales).to(h.dtype)
        scales = None
    if is_own:
        is_new = total is None
        if total is None:
            is_rounded_once = is_single_chunk and weight.dtype == torch.bfloat16
            dtype = torch.bfloat16 if is_rounded_once else torch.float32
            total = h.new_empty((d.shape[1], h.shape[1]), dtype=dtype)
        return gemm.mm_(d.t(), h, total, add=not is_new, scales=scales, added=added)
    total = _accumulate_outer(
        total, d, h, weight, is_single_chunk=is_single_chunk and added is None
    )
    if added is not None:
        added.add_to_(total)
    return total


def _accumulate_outer(
    total: Tensor | None, d: Tensor, h: Tensor, weight: Tensor, *, is_single_chunk: bool
) -> Tensor:
    if is_full_precision(h):
        return d.t() @ h if total is None else total.addmm_(d.t(), h)
    if h.is_cuda:
        if total is None and is_single_chunk and weight.numel() >= NARROW_FROM:
            return torch.mm(d.to(h.dtype).t(), h)
        if total is None:
            return torch.mm(d.to(h.dtype).t(), h, out_dtype=torch.float32)
        return torch.addmm(total, d.to(h.dtype).t(), h, out_dtype=torch.float32, out=total)
    d = d.float()
    h = h.float()
    if total is None and not is_single_chunk:
        total = d.new_zeros(weight.shape)
    if total is not None:
        return add_product_(total, d.t(), h)
    total = torch.empty_like(weight, memory_format=torch.contiguous_format)
    for v in range(0, total.shape[0], WIDEN_ROWS):
        part = total[v : v + WIDEN_ROWS]
        part.copy_(accumulate_outer(None, d[:, v : v + WIDEN_ROWS], h, part, is_single_chunk=True))
    return total


def weighted_column_sum(matrix: Tensor, coefficients: Tensor) -> Tensor:
    """(V,) fp32 = Σ_t coefficients[t]·matrix[t], of a matrix (C, V) of exponentials."""
    if not matrix.is_cuda:
        total = coefficients.new_zeros(matrix.shape[1])
        for t in range(0, matrix.shape[0], COLUMN_SUM_ROWS):
            rows = slice(t, t + COLUMN_SUM_ROWS)
            total += coefficients[rows] @ widened(matrix[rows])
        return total
    # Three 16-bit numbers hold the 24 digits of an fp32 one: no fp32 copy of the matrix.
    parts = coefficients.new_zeros((coefficients.shape[0], 8), dtype=matrix.dtype)
    left = coefficients
    for i in range(3):
        parts[:, i] = left
        left = left - parts[:, i].float()
    return torch.mm(matrix.t(), parts, out_dtype=torch.float32).sum(1)
