"""Scaling that keeps fp16 gradients in range before the loss scale is known.

In a large step a token has a weight of about 1e-5, and its d-logits are smaller. The smallest fp16
number is 6e-8. Therefore weights are scaled up to 1 first (`weight_unit`), sums stay in fp32 (which
needs fp32 copies of dH and dW), and each tensor is rounded to fp16 once, with its largest element
near 2^13 (`narrowed`). Backward multiplies by upstream · unit. Scaling by powers of two is exact.
bf16 has the range of fp32 and does not need this.
"""

from __future__ import annotations

import torch
from torch import Tensor

# The largest element of a stored gradient is below 2^13, a factor of 8 below fp16's maximum.
TOP_EXPONENT = 13


def needs_range(dtype: torch.dtype) -> bool:
    """Return whether gradients of this dtype are stored with a scale."""
    return dtype == torch.float16


def weight_unit(weights: Tensor) -> Tensor:
    """Return a power of two (0-d fp32) that scales the largest of (T,) weights to [0.5, 1). Does
    not sync.
    """
    return power_of_two(-largest_exponent(weights))


def narrowed(gradient: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return `stored` in `dtype` and a 0-d fp32 power of two with gradient = stored · unit."""
    exponent = largest_exponent(gradient) - TOP_EXPONENT
    return gradient.mul_(power_of_two(-exponent)).to(dtype), power_of_two(exponent)


def largest_exponent(x: Tensor) -> Tensor:
    """Return e, 0-d, with 2^(e-1) <= max |x| < 2^e, clamped so that 2^±e is normal; 0 for zeros."""
    if not x.numel():
        return torch.zeros((), dtype=torch.int32, device=x.device)
    low, high = x.aminmax()
    return torch.frexp(torch.maximum(-low, high)).exponent.clamp(-100, 100)


def power_of_two(exponent: Tensor) -> Tensor:
    """Return 2^exponent in fp32 for int32 -126 to 127. torch.ldexp is not exact on a GPU."""
    return ((exponent + 127) << 23).view(torch.float32)
