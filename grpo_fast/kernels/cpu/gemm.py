"""Matrix product for the CPU (csrc/api/gemm.cpp), and bf16 copies of weights for it.

route.py selects the products that use it.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

from grpo_fast.kernels.agree import Pair, draw, in_fresh_thread
from grpo_fast.kernels.cpu import loader
from grpo_fast.kernels.types import POSITIVE16, AddedRows, contiguous_rows, detached

logger = logging.getLogger("grpo_fast")

# Store the accepted dtypes when the module is imported, because a test replaces torch.float32 by
# torch.float64.
DTYPES = torch.float32, torch.bfloat16


@functools.cache
def unavailable(dtype: torch.dtype) -> str | None:
    """Return why `mm_` cannot be used for this dtype on this machine, or None if it can."""
    if dtype not in DTYPES:
        return f"the csrc product takes float32 and bfloat16, not {dtype}"
    reason = loader.unavailable("gemm")
    if reason:
        return reason
    # Query the instruction sets that the library was compiled for. The CPU itself may support more.
    has_fma, has_dot16, _ = loader.operator("gemm", "features")()
    if dtype == DTYPES[0]:
        return None if has_fma else "it was compiled without AVX2 and FMA"
    if not has_dot16 and not has_tiles():
        return "this CPU has neither AVX512_BF16 nor AMX"
    # Compare in a new thread, because the result is cached. It must not depend on the autocast mode
    # or the default device of the first caller.
    difference = in_fresh_thread(_bf16_difference)
    if difference is None:
        return None
    logger.warning("grpo_fast: the bf16 product is not used, fp32 is: %s", difference)
    return f"its bf16 product is wrong: {difference}"


@functools.cache
def has_tiles() -> bool:
    """Return whether bf16 products can use AMX, the matrix instructions of some CPUs.

    AMX is used through an internal function of libtorch_cpu, which a torch release may lack.
    """
    has_amx = {"amx_bf16", "amx_tile"} <= set(loader.cpu_flags())
    return has_amx and loader.operator("gemm", "features")()[2]


def uses_tiles(x: Tensor) -> bool:
    """Return whether a product whose second operand is x runs on AMX (bf16 on a CPU with AMX)."""
    return x.dtype == torch.bfloat16 and has_tiles()


def _bf16_difference() -> str | None:
    """Compare a small bf16 product with the same product in fp32.

    With AMX, the bf16 product calls a function of torch that is not part of the public API. A torch
    release may change this function.
    """

    def ours(a: Tensor, b: Tensor) -> Tensor:
        return mm_(a, b.t(), a.new_empty(len(a), len(b), dtype=torch.float32))

    # Choose sizes that are not multiples of a tile, so that full and incomplete tiles are tested.
    inputs = [draw(rows, 96, seed=rows).bfloat16() for rows in (130, 70)]
    return Pair(ours, lambda a, b: a.float() @ b.float().t(), inputs, 3e-6).difference()


def mm_(
    a: Tensor,  # (M, K) fp32, bf16 or POSITIVE16; or the transpose of such a matrix
    b: Tensor,  # (K, N) fp32 or bf16; or the transpose of such a matrix
    out: Tensor,  # (M, N) fp32 or bf16, contiguous rows
    *,
    add: bool = False,
    scales: Tensor | None = None,  # (K,) fp32
    out_scales: Tensor | None = None,  # (M,) fp32
    added: AddedRows | None = None,
) -> Tensor:  # (M, N)
    """Compute the matrix product `out = a·b`, or `out += a·b` if `add` is set.

    The products of elements are exact and summed in fp32. The sum is rounded once, to the dtype of
    `out`. Its bits depend only on one row of `a` and one column of `b`, not on M, N or the number
    of threads.

    With a bf16 `b`, the elements of `a` have the following precision:

    - bf16: exact.
    - fp32: rounded to 16 significant bits. `a` is multiplied in two parts, which takes twice the
      time.
    - POSITIVE16: rounded to bf16.
    - transposed POSITIVE16: rounded to bf16, except for large elements. An element is large if its
      square is at least 1/16 of the sum of squares of its row.

    Args:
        a: (M, K) fp32, bf16 or POSITIVE16, or the transpose of such a matrix.
        b: (K, N) fp32 or bf16, or the transpose of such a matrix.
        out: (M, N) fp32 or bf16, rows contiguous.
        add: add to `out` instead of overwriting it.
        scales: (K,) fp32 factors of the columns of `a`. `a` must be transposed and not bf16.
        out_scales: (M,) fp32 factors of the rows of `a·b`, applied before anything is added. A
            factor of 0 gives exact zeros.
        added: rows added to the result before it is rounded.

    Returns:
        `out`.
    """
    # The operator accepts `scales` only with a transposed `a`. Pass the transpose explicitly,
    # because `_as_stored` cannot tell a matrix of one row or one column from its transpose.
    a, a_transposed = (a.t(), True) if scales is not None else _as_stored(a)
    # If `a` is a transposed POSITIVE16 matrix, the kernel corrects the rounding of large elements
    # by adding rows of `b`, which must be contiguous for this.
    keeps_heavy = a.dtype == POSITIVE16 and a_transposed
    b, b_transposed = (b.contiguous(), False) if keeps_heavy else _as_stored(b)
    extra: tuple[Tensor | None, ...] = (None,) * 4
    if added is not None:
        values = contiguous_rows(added.values)
        extra = detached(added.coefficients), values, added.ids, added.rows
    # The first two flags say whether the matrices are passed as their transposes.
    layout = a_transposed, b_transposed, add, uses_tiles(b)
    loader.operator("gemm", "mm_")(
        detached(a), detached(b), detached(out), *layout, scales, out_scales, *extra
    )
    return out


def product(a: Tensor, b: Tensor, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    """Return the product of a (M, K) and b (K, N) in a new tensor of the shape (*shape, N)."""
    out = a.new_empty(*shape, b.shape[1], dtype=dtype)
    mm_(a, b, out.view(-1, b.shape[1]))
    return out


def _as_stored(x: Tensor) -> tuple[Tensor, bool]:
    """Return (matrix, is_transposed), where `matrix` is x or its transpose with contiguous rows."""
    if x.stride(1) == 1 or x.shape[1] == 1:
        return x, False
    return (x.t(), True) if x.stride(0) == 1 else (x.contiguous(), False)


# ---- bf16 copies of fp32 weights

# Cached bf16 copies of weights, as id(weight) -> (weight, (version, address), copy). The variable
# has a value only inside `shared_copies`.
_copies: ContextVar[dict[int, tuple[Tensor, tuple[int, int], Tensor]]] = ContextVar("_copies")


@contextmanager
def shared_copies() -> Iterator[None]:
    """Convert each weight to bf16 only once while this context is open.

    The copies take 2 bytes per element until the context ends. Do not write to `weight.data` while
    the context is open, because the layers would still use the old copies.
    """
    token = _copies.set({})
    try:
        yield
    finally:
        _copies.reset(token)


def narrow_copy(weight: Tensor) -> Tensor:
    """Return a bf16 copy of a weight. Inside `shared_copies`, the copy is cached and reused."""
    stored = _copies.get({})
    state = weight._version, weight.data_ptr()
    if id(weight) not in stored or stored[id(weight)][1] != state:
        # Copy outside of inference mode, because autograd cannot save tensors created in it.
        with torch.inference_mode(False):
            stored[id(weight)] = weight, state, weight.detach().to(torch.bfloat16)
    return stored[id(weight)][2]
