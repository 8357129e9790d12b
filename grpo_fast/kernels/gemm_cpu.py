"""Our matrix product for the CPU (csrc/gemm.cpp), and where it is to be used instead of torch's.

torch multiplies fp32 through MKL, which gives an AMD core half of what it can do; and it rounds a bf16 product to bf16,
which moves logps by 1e-2. So ours is used for fp32 on x86 CPUs that are not Intel's, and for bf16 wherever the CPU
multiplies 16-bit numbers (AVX512_BF16, AMX). Elsewhere the vendor's product is as good, or 16-bit numbers are widened.
Where the user lets torch round fp32 operands (medium matmul precision on AMX), ours keeps a loss's logps in fp32.

Environment:
    GRPO_FAST_GEMM=auto|own|vendor   whose fp32 product (default auto: ours where the rule above says so)
"""

from __future__ import annotations

import functools
import logging
import os
from typing import Any

import torch
from torch import Tensor

from grpo_fast.kernels import csrc_loader
from grpo_fast.kernels.added_rows import AddedRows

logger = logging.getLogger("grpo_fast")

CHOICES = ("auto", "own", "vendor")
AT_HOME = "MKL is at home on this CPU"
# Numbers from 0 to 2^30 with ten binary digits (Positive16 in csrc/storage.h): torch has no such dtype.
POSITIVE16 = torch.int16


@functools.cache
def unavailable(dtype: torch.dtype) -> str | None:
    """Why `mm_` should not be used here for fp32 or bf16 operands, or None when it should; asked once."""
    choice = os.environ.get("GRPO_FAST_GEMM", "auto")
    if choice not in CHOICES:
        raise ValueError(f"GRPO_FAST_GEMM: expected one of {list(CHOICES)}, got {choice!r}")
    if dtype not in (torch.float32, torch.bfloat16):
        return f"it multiplies float32 and bfloat16, not {dtype}"
    if choice == "vendor":
        return "GRPO_FAST_GEMM=vendor"
    reason = csrc_loader.load("gemm")
    if reason:
        return reason
    kernels = torch.ops.grpo_fast_gemm
    if dtype == torch.float32:
        if not kernels.has_fma():
            return "it was compiled without AVX2 and FMA"
        is_intel = csrc_loader.cpu_vendor() == "GenuineIntel"
        return AT_HOME if choice == "auto" and is_intel else None
    if not kernels.has_dot16() and not has_tiles():
        return "this CPU has neither AVX512_BF16 nor AMX"
    return None if _is_right(has_tiles()) else "its bf16 product failed its self-check"


@functools.cache
def has_tiles() -> bool:
    """Whether bf16 products go through AMX, by way of a function inside libtorch_cpu."""
    return {"amx_bf16", "amx_tile"} <= set(csrc_loader.cpu_flags()) and torch.ops.grpo_fast_gemm.has_tiles()


def _is_right(tiles: bool) -> bool:
    """Whether a small bf16 product agrees with the widened one: what lies outside torch's interface needs a look."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(rows, 96, generator=generator).bfloat16() for rows in (130, 70))  # whole tiles and edges
    out = torch.empty(130, 70)
    torch.ops.grpo_fast_gemm.mm_(a, b, out, False, True, False, 1, tiles, None, False, *[None] * 6)
    error = (out - a.float() @ b.float().t()).abs().amax().item()
    if not error <= 1e-4:
        logger.warning("grpo_fast: the bf16 product is off by %g on a self-check; widening to fp32 instead", error)
    return error <= 1e-4


def multiplies(x: Tensor) -> bool:
    """Whether products with x as their second operand should go through `mm_`."""
    if not x.is_cpu:
        return False
    reason = unavailable(x.dtype)
    return reason is None or (reason == AT_HOME and vendor_rounds())


def vendor_rounds() -> bool:
    """Whether torch may round fp32 operands on the CPU, as `torch.set_float32_matmul_precision("medium")` has it."""
    return torch.backends.mkldnn.matmul.fp32_precision not in ("ieee", "none")  # type: ignore[attr-defined]


@functools.cache
def _door() -> Any:
    return torch.ops.grpo_fast_gemm.mm_.default


def widened(x: Tensor) -> Tensor:
    """16-bit numbers, POSITIVE16 included, in fp32; others as they are."""
    if x.dtype == POSITIVE16:
        bits = x.to(torch.int32) & 0xFFFF
        return torch.where(bits == 0, 0, (bits << 14) + (29 << 23)).view(torch.float32)
    return x if x.dtype.itemsize >= 4 else x.float()


def mm_(
    a: Tensor,  # (M, K) fp32, bf16 or POSITIVE16; or the transpose of such a matrix
    b: Tensor,  # (K, N) fp32 or bf16, likewise
    out: Tensor,  # (M, N) fp32 or bf16, contiguous rows
    *,
    add: bool = False,
    parts: int = 1,
    scales: Tensor | None = None,  # (K,) fp32
    keeps_heavy: bool = False,
    out_scales: Tensor | None = None,  # (M,) fp32
    added: AddedRows | None = None,
) -> Tensor:  # (M, N)
    """out = a·b, or out += a·b: products exact, sums in fp32, rounded once to the dtype of `out`.

    An fp32 or POSITIVE16 a beside a bf16 b is rounded to bf16 with `parts=1`; with 2, what the rounding leaves is
    multiplied as well (16 digits, at twice the time). `keeps_heavy`, of an a that is a transpose: with 1 part, elements
    that dominate a sum keep both, those with a 16th of the squares of their row. `scales`: the columns of a, which must
    be a transpose and no bf16, are multiplied by these first. `out_scales`: the rows of a·b, by these before anything
    is added (exact zeros where they are 0). An element's bits depend on its row of a and its column of b only: not on
    M, N, or the number of threads.

    Raises:
        RuntimeError: a dtype, shape or stride that it does not take.
    """
    is_transpose = scales is not None or keeps_heavy
    a, a_transposed = (a.t(), True) if is_transpose else _as_stored(a)
    b, b_transposed = (b.contiguous(), False) if keeps_heavy else _as_stored(b)
    extra: tuple[Tensor | None, ...] = (None,) * 5
    if added is not None:
        values = detached(added.values)
        values = values if values.stride(1) == 1 else values.contiguous()
        extra = *added.by_id(), detached(added.coefficients), added.rows, values
    tiles = b.dtype == torch.bfloat16 and has_tiles()
    layout = a_transposed, b_transposed, add, parts, tiles
    _door()(detached(a), detached(b), detached(out), *layout, scales, keeps_heavy, out_scales, *extra)
    return out


def detached(x: Tensor) -> Tensor:
    """Autograd never looks into the kernels. (A detach costs a microsecond, as much as 500 exponentials.)"""
    return x.detach() if x.requires_grad else x


def _as_stored(x: Tensor) -> tuple[Tensor, bool]:
    """The matrix whose rows are contiguous in memory, and whether it is the transpose of x."""
    if x.stride(1) == 1 or x.shape[1] == 1:
        return x, False
    return (x.t(), True) if x.stride(0) == 1 else (x.contiguous(), False)
