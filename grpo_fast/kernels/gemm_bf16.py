"""bf16 matrix product with fp32 output on CPUs with AMX (csrc/gemm_bf16.cpp).

`torch.mm` rounds such a product to bf16 on the CPU. Where this module says it is unavailable, widen to fp32 instead.
"""

from __future__ import annotations

import functools
import logging

import torch
from torch import Tensor

from grpo_fast.kernels import csrc_loader

logger = logging.getLogger("grpo_fast")


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


@functools.cache
def is_trusted() -> bool:
    """Whether `mm_bf16_fp32` runs here and has just agreed with the widened product on a small problem; asked once.

    The tile product is looked up in libtorch_cpu, outside of its stable interface: it is believed only after a look.
    """
    if unavailable():
        return False
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(rows, 96, generator=generator).bfloat16() for rows in (130, 70))  # a tile and an edge
    error = (mm_bf16_fp32(a, b) - a.float() @ b.float().t()).abs().amax().item()
    if error <= 1e-4:
        return True
    logger.warning(
        "grpo_fast: the bf16 GEMM of this torch is off by %g on a self-check; widening to fp32 instead", error
    )
    return False
