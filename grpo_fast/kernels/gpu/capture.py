"""CUDA graphs: what may be recorded, and the one question that the host asks for it.

A graph holds launches, not decisions: while a stream is recorded, no value may reach the host.
`linear_grpo_loss`, `logits_grpo_loss`, `grpo_loss`, `linear_logps`, `logits_logps`, their gradients
and `LossOutput.metrics` then do

    no compaction    rows without a coefficient stay in the GEMMs, as exact zeros (so they must be
                     finite); a target of -100 is selected away
    no value checks  bad values in tensors are not reported; ids are clamped

and refuse what cannot be had without looking: `completion_mask` and `grad_filter` (the number of
tokens or columns that are left shapes the work) and `validate="full"`. Pack the batch
(`cu_seqlens`, whose values may change between replays) and give a slot that does not count the
advantage 0 and `num_items_in_batch`, with beta = 0. Everything that is no tensor is recorded as it
is. Call once before recording: kernels are compiled and loaded then. Read `metrics` inside.
"""

from __future__ import annotations

import torch
from torch import Tensor


def is_capturing(x: Tensor) -> bool:
    """Whether the work on x is being recorded, so that nothing may depend on values."""
    if not x.is_cuda:
        return False
    with torch.cuda.device_of(x):  # torch asks the stream of the current device
        return torch.cuda.is_current_stream_capturing()


def refuse(name: str, x: Tensor, value: object, expected: object = None) -> None:
    """A ValueError for an argument that needs a look at values, while the work on x is recorded."""
    if is_capturing(x) and (isinstance(value, Tensor) or value != expected):
        came = "a tensor" if isinstance(value, Tensor) else repr(value)
        raise ValueError(
            f"{name}: expected {expected!r} while a CUDA graph is recorded, got {came}"
        )
