"""Triton kernel that multiplies a gradient by the upstream gradient in place.

    gradient *= factor

The kernel reads and writes the gradient once. If the factor is 1, as in `loss.backward()`, every
program returns immediately. The programs check this themselves, because the factor is on the
device, and the host would have to synchronise to read it.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from grpo_fast.kernels.gpu.launch import ceil_div, launch

# Number of elements that a program processes per step.
BLOCK = 4096
# Maximum number of programs. It is large enough to keep any device busy. It is small enough that,
# for an upstream gradient of 1, all programs start and return within microseconds.
PROGRAMS = 2048


@triton.jit(do_not_specialize=["size"])
def scale_kernel(gradient_ptr, factor_ptr, size, BLOCK: tl.constexpr):
    factor = tl.load(factor_ptr).to(tl.float32)
    if factor != 1.0:
        # Process several blocks per program, because at most PROGRAMS programs are launched.
        step = tl.num_programs(0).to(tl.int64) * BLOCK
        first = tl.program_id(0).to(tl.int64) * BLOCK
        for start in range(first, tl.cast(size, tl.int64), step):
            at = start + tl.arange(0, BLOCK)
            values = tl.load(gradient_ptr + at, mask=at < size, other=0.0).to(tl.float32)
            tl.store(
                gradient_ptr + at, (values * factor).to(gradient_ptr.dtype.element_ty), mask=at <
                size,
            )  # fmt: skip


def scale_(gradient: Tensor, factor: Tensor) -> Tensor:
    """Multiply a contiguous gradient by a one-element factor in place.

    The dtype of the gradient must have at most 32 bits, because the product is computed in fp32.
    """
    size = gradient.numel()
    programs = min(ceil_div(size, BLOCK), PROGRAMS)
    launch(scale_kernel, programs, gradient, factor.detach(), size, BLOCK=BLOCK, num_warps=8)
    return gradient
