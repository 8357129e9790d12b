"""Triton kernel that computes the numbers for the late checks (loss/checks.py).

For each vector, these are its minimum, its maximum, and its least step from one element to the
next. Up to VECTORS vectors share a launch, with one program each. With torch, each vector would
take several launches.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from grpo_fast.kernels.gpu.launch import launch

# Maximum number of vectors in a launch, and number of elements that a program reads per step.
VECTORS = 8
BLOCK = 2048


@triton.jit
def find_extremes(x_ptr, size, vector, out_ptr, BLOCK: tl.constexpr):
    """Write minimum, maximum and least step of x. Programs of other vectors do nothing."""
    if tl.program_id(0) == vector:
        infinity = tl.full([BLOCK], float("inf"), tl.float64)
        low = infinity
        high = -infinity
        step = infinity
        is_nan = tl.zeros([BLOCK], tl.int32)
        for start in range(0, size, BLOCK):
            at = start + tl.arange(0, BLOCK)
            inside = at < size
            has_next = at + 1 < size
            x = tl.load(x_ptr + at, mask=inside, other=0).to(tl.float64)
            after = tl.load(x_ptr + at + 1, mask=has_next, other=0).to(tl.float64)
            is_nan |= (inside & (x != x)).to(tl.int32)
            low = tl.minimum(low, tl.where(inside, x, infinity))
            high = tl.maximum(high, tl.where(inside, x, -infinity))
            step = tl.minimum(step, tl.where(has_next, after - x, infinity))
        has_nan = tl.max(is_nan, 0) > 0
        out = out_ptr + 3 * vector
        tl.store(out, tl.where(has_nan, float("nan"), tl.min(low, 0)))
        tl.store(out + 1, tl.where(has_nan, float("nan"), tl.max(high, 0)))
        tl.store(out + 2, tl.min(step, 0))


@triton.jit(do_not_specialize=[f"size_{i}" for i in range(VECTORS)])
def extremes_kernel(
    x_0, size_0, x_1, size_1, x_2, size_2, x_3, size_3, x_4, size_4, x_5, size_5, x_6, size_6, x_7,
    size_7, out_ptr, BLOCK: tl.constexpr,
):  # fmt: skip
    vectors = (x_0, x_1, x_2, x_3, x_4, x_5, x_6, x_7)
    sizes = (size_0, size_1, size_2, size_3, size_4, size_5, size_6, size_7)
    for i in tl.static_range(8):
        if vectors[i] is not None:
            find_extremes(vectors[i], sizes[i], i, out_ptr, BLOCK)


def extremes(vectors: Sequence[Tensor]) -> Tensor:
    """Return the minimum, the maximum and the least step of each vector, (count, 3) fp64.

    The vectors are not empty. Minimum and maximum are NaN if the vector contains NaN. The step of a
    single value is inf.
    """
    out = torch.empty((len(vectors), 3), dtype=torch.float64, device=vectors[0].device)
    for first in range(0, len(vectors), VECTORS):
        group = vectors[first : first + VECTORS]
        arguments: list[object] = []
        for x in group:
            arguments += (x.contiguous(), x.numel())
        arguments += (None, 0) * (VECTORS - len(group))
        here = out[first:] if first else out  # a view takes the host a microsecond
        launch(extremes_kernel, len(group), *arguments, here, BLOCK=BLOCK, num_warps=8)
    return out
