"""The three matrix products of a chunk, by the vendor's GEMM: which call, for each dtype and device."""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_fast.kernels import gemm_bf16

# Vocabulary rows that are widened to fp32 at a time, where the device has no 16-bit GEMM with fp32 output.
WIDEN_ROWS = 16384


def is_wide(x: Tensor) -> bool:
    """True for fp32 and fp64, which GEMMs treat as they are."""
    return x.dtype.itemsize >= 4


def matmul_wide(h: Tensor, weight: Tensor, *, out: Tensor) -> None:
    """out (C, V) fp32 = h (C, H) · weight (V, H)ᵀ, products exact and sums in fp32 for 16-bit inputs."""
    if is_wide(h):
        torch.mm(h, weight.t(), out=out)
    elif h.is_cuda:
        torch.mm(h, weight.t(), out_dtype=torch.float32, out=out)
    elif h.dtype == torch.bfloat16 and h.shape[1] % 2 == 0 and gemm_bf16.is_trusted():
        for v in range(0, weight.shape[0], WIDEN_ROWS):
            out[:, v : v + WIDEN_ROWS] = gemm_bf16.mm_bf16_fp32(h, weight[v : v + WIDEN_ROWS])
    else:
        h = h.float()
        for v in range(0, weight.shape[0], WIDEN_ROWS):
            torch.mm(h, weight[v : v + WIDEN_ROWS].float().t(), out=out[:, v : v + WIDEN_ROWS])


def matmul_narrow(d: Tensor, weight: Tensor) -> Tensor:
    """(C, H) = d (C, V) fp32 · weight (V, H); on a GPU d is stored in the weight's 16 bits first."""
    if is_wide(weight):
        return d @ weight
    if weight.is_cuda:
        return d.to(weight.dtype) @ weight
    dh = d.new_zeros((d.shape[0], weight.shape[1]))
    for v in range(0, weight.shape[0], WIDEN_ROWS):
        dh.addmm_(d[:, v : v + WIDEN_ROWS], weight[v : v + WIDEN_ROWS].float())
    return dh


def accumulate_outer(total: Tensor | None, d: Tensor, h: Tensor, weight: Tensor, *, is_only: bool) -> Tensor:
    """total (V, H) fp32 += dᵀ (V, C) · h (C, H). An only chunk on the CPU goes straight to the weight's dtype."""
    if is_wide(h):
        return d.t() @ h if total is None else total.addmm_(d.t(), h)
    if h.is_cuda:
        if total is None:
            return torch.mm(d.to(h.dtype).t(), h, out_dtype=torch.float32)
        return torch.addmm(total, d.to(h.dtype).t(), h, out_dtype=torch.float32, out=total)
    h = h.float()
    if total is None and not is_only:
        total = d.new_zeros(weight.shape)
    if total is not None:
        return total.addmm_(d.t(), h)
    total = torch.empty_like(weight, memory_format=torch.contiguous_format)
    for v in range(0, total.shape[0], WIDEN_ROWS):
        total[v : v + WIDEN_ROWS] = d[:, v : v + WIDEN_ROWS].t() @ h
    return total
