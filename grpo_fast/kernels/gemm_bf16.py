"""bf16 matrix product with fp32 output on CPUs with AMX (csrc/gemm_bf16.cpp).

`torch.mm` rounds such a product to bf16 on the CPU. Where this module says it is unavailable, widen to fp32 instead.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from grpo_fast.kernels import csrc_loader


@functools.cache
def unavailable() -> str | None:
    """Why `mm_bf16_fp32` cannot run here, or None when it can."""
    missing = {"amx_bf16", "amx_tile"} - set(csrc_loader.cpu_flags())
    if missing:
        return f"this CPU lacks {', '.join(sorted(missing))}"
    reason = csrc_loader.load("gemm_bf16")
    if reason:
        return reason
    return None if torch.ops.grpo_fast_gemm_bf16.has_brgemm() else "this torch exports no bf16 brgemm"


def mm_bf16_fp32(
    a: Tensor,  # (M, K) bf16, K even
    b: Tensor,  # (N, K) bf16
) -> Tensor:  # (M, N) fp32
    """a · bᵀ with exact products and sums in fp32; a row's result does not depend on the other rows.

    Raises:
        ValueError: it cannot run here; the message has the reason.
        RuntimeError: a dtype, shape or stride that it does not take.
    """
    reason = unavailable()
    if reason:
        raise ValueError(f"mm_bf16_fp32: expected a CPU with AMX and a C++ compiler, got one where {reason}")
    with torch.no_grad():
        return torch.ops.grpo_fast_gemm_bf16.mm_bf16_fp32(a.detach(), b.detach(), False)
