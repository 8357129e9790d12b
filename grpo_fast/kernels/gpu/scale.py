"""gradient *= upstream on a GPU, at no cost where the upstream gradient is 1 (it is, for
`loss.backward()`).

The factor lies on the device: to look at it from the host would wait for everything before it.
Every program looks for itself and is done at once if it is 1; otherwise one read and one write of
the gradient.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from grpo_fast.kernels.gpu.launch import launch

BLOCK = 4096
# Enough to fill any device, few enough to start and end in microseconds.
PROGRAMS = 2048


@triton.jit(do_not_specialize=["size"])
def scale_kernel(gradient_ptr, factor_ptr, size, BLOCK: tl.constexpr):
    factor = tl.load(factor_ptr).to(tl.float32)
    if factor != 1.0:
        step = tl.num_programs(0).to(tl.int64) * BLOCK
        first = tl.program_id(0).to(tl.int64) * BLOCK
        for start in range(first, tl.cast(size, tl.int64), step):
            at = start + tl.arange(0, BLOCK)
            values = tl.load(gradient_ptr + at, mask=at < size, other=0.0).to(tl.float32)
            tl.store(
                gradient_ptr + at,
                (values * factor).to(gradient_ptr.dtype.element_ty),
                mask=at < size,
            )


def scale_(gradient: Tensor, factor: Tensor) -> Tensor:
    """gradient (contiguous, ≤ 32 bits) times factor (one element), in place; a 1 writes nothing."""
    size = gradient.numel()
    if size:
        programs = min(triton.cdiv(size, BLOCK), PROGRAMS)
        launch(scale_kernel, programs, gradient, factor.detach(), size, BLOCK=BLOCK, num_warps=8)
    return gradient
