"""fp16 gradients that are formed before anybody knows the loss's scale.

A token of a large step weighs 1e-5, its d-logits less: fp16 ends at 6e-8. So weights are brought up
to 1 before anything is formed (`weight_unit`), sums stay in fp32 (a copy of dH and dW), and each
tensor is rounded to fp16 once, with its largest element near 2^13 (`narrowed`). Backward multiplies
by upstream · unit. Powers of two change no digit; bf16 has fp32's range.
"""

from __future__ import annotations

import torch
from torch import Tensor

# The largest element of a kept gradient lies below this: a factor of 8 to fp16's end.
TOP_EXPONENT = 13


def needs_range(dtype: torch.dtype) -> bool:
    """Whether gradients of this dtype are kept beside a power of two."""
    return dtype == torch.float16


def weight_unit(weights: Tensor) -> Tensor:
    """0-d fp32 power of two that brings the largest of (T,) weights to 0.5 to 1; no sync."""
    return power_of_two(-largest_exponent(weights))


def narrowed(gradient: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """gradient = stored · unit: `stored` in `dtype`, and a 0-d fp32 power of two."""
    exponent = largest_exponent(gradient) - TOP_EXPONENT
    return gradient.mul_(power_of_two(-exponent)).to(dtype), power_of_two(exponent)


def largest_exponent(x: Tensor) -> Tensor:
    """0-d: e with 2^(e-1) <= max |x| < 2^e, so that 2^±e is a normal number; 0 of zeros."""
    if not x.numel():
        return torch.zeros((), dtype=torch.int32, device=x.device)
    low, high = x.aminmax()
    return torch.frexp(torch.maximum(-low, high)).exponent.clamp(-100, 100)


def power_of_two(exponent: Tensor) -> Tensor:
    """2^exponent in fp32 for int32 from -126 to 127; torch.ldexp is not exact on a GPU."""
    return ((exponent + 127) << 23).view(torch.float32)
