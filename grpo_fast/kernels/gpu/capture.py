"""Detect CUDA graph capture, and reject arguments that cannot be used during capture.

A graph contains kernel launches but no decisions of the host. During capture, the host must
therefore not read tensor values. `linear_grpo_loss`, `logits_grpo_loss`, `grpo_loss`,
`linear_logps`, `logits_logps`, their gradients and `LossOutput.metrics` then behave as follows:

    no compaction    rows with coefficient 0 stay in the GEMMs as exact zeros, so their inputs must
                     be finite; targets of -100 are masked
    no value checks  invalid values in tensors are not reported; ids are clamped into [0, V)

Arguments whose values determine shapes are rejected: `completion_mask`, `grad_filter` and
`validate="full"`. Pack the batch instead of passing a mask. The values of `cu_seqlens` may change
between replays. To disable a completion, set its advantage to 0, use beta = 0 and pass
`num_items_in_batch`. Arguments that are not tensors are captured as constants. Call the function
once before capture, so that its kernels are compiled and loaded. Read `metrics` during capture.
"""

from __future__ import annotations

import torch
from torch import Tensor


def is_capturing(x: Tensor) -> bool:
    """Return whether operations on x are being captured into a CUDA graph."""
    if not x.is_cuda:
        return False
    with torch.cuda.device_of(x):  # the query below uses the stream of the current device
        return torch.cuda.is_current_stream_capturing()


def refuse(name: str, x: Tensor, value: object, expected: object = None) -> None:
    """Raise ValueError if a CUDA graph captures operations on x and `value` is not `expected`.

    Call this for an argument whose value the host would have to read.
    """
    if is_capturing(x) and (isinstance(value, Tensor) or value != expected):
        came = "a tensor" if isinstance(value, Tensor) else repr(value)
        raise ValueError(
            f"{name}: expected {expected!r} while a CUDA graph is recorded, got {came}"
        )
