"""Scaling that keeps fp16 gradients in range before the loss scale is known.

In a large batch, a token has a weight of about 1e-5, and its d-logits are even smaller. Many of
them would be rounded to 0, because the smallest positive fp16 number is 6e-8. Therefore the weights
are first scaled by a power of two, the `weight_unit`, so that the largest weight is about 1. Sums
stay in fp32, which needs fp32 copies of dH and dW. `narrowed` then scales each gradient by a second
power of two, so that its largest element is near 2^13, and rounds it to fp16 once. The backward
pass multiplies the gradients by upstream·unit, which undoes the scaling.

Scaling by powers of two is exact. bf16 has the range of fp32 and does not need this.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Exponent that bounds stored gradients: they are scaled so that their largest element is less than
# 2^13. This leaves a factor of 8 below the fp16 maximum (2^16).
TOP_EXPONENT = 13


def needs_scaling(dtype: torch.dtype) -> bool:
    """Return whether gradients of this dtype must be scaled when they are stored (fp16 only)."""
    return dtype == torch.float16


def weight_unit(weights: Tensor) -> Tensor:
    """Return the power of two that scales the largest weight into [0.5, 1), as 0-d fp32."""
    return power_of_two(-largest_exponent(weights))


def narrowed(gradient: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Scale a gradient into the range of `dtype`, and round it once.

    Returns:
        A pair (stored, unit), with gradient = stored·unit. `stored` has the given dtype, and `unit`
        is a power of two (0-d fp32). The contents of `gradient` are overwritten.
    """
    exponent = largest_exponent(gradient) - TOP_EXPONENT
    return gradient.mul_(power_of_two(-exponent)).to(dtype), power_of_two(exponent)


def largest_exponent(x: Tensor) -> Tensor:
    """Return the exponent e with 2^(e-1) <= max |x| < 2^e, as a 0-d int32 tensor.

    The exponent is clamped so that 2^e and 2^-e are normal numbers. It is 0 if all elements are 0.
    """
    if not x.numel():
        return torch.zeros((), dtype=torch.int32, device=x.device)
    # Use aminmax, which needs one pass and no temporary tensor. x.abs().max() would need both.
    low, high = x.aminmax()
    return torch.frexp(torch.maximum(-low, high)).exponent.clamp(-100, 100)


def power_of_two(exponent: Tensor) -> Tensor:
    """Return 2^exponent as an fp32 tensor, for int32 exponents from -126 to 127."""
    # Build the bits of the float from its biased exponent, because torch.ldexp is not exact on a
    # GPU.
    return ((exponent + 127) << 23).view(torch.float32)
