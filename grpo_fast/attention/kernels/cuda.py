"""FlashAttention 2 on CUDA, as built into torch.

Inputs are 16-bit tensors q (Tq, H, D), k and v (Tk, H_kv, D), with D a multiple of 8 up to 256, and
int32 offsets of the spans. Outputs are the attention output and lse (H, Tq) in fp32. Each function
calls the operator that torch's autograd formula also calls. The backward pass can therefore receive
an output and lse that were merged from several calls. It is deterministic if torch uses
deterministic algorithms.

The signatures match torch 2.11 to 2.13.
"""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_fast.attention.kernels.kernel import Gradients, Result, Saved
from grpo_fast.attention.spans import AttentionParams, Spans


def longest(spans: Spans) -> tuple[int, int]:
    """Return the length of the longest query span and the length of the longest key span.

    The first length is at least 2, because the kernel would use its decoding path for a single
    query.
    """
    return max(2, *spans.queries), max(spans.keys)


def window_of(spans: Spans, params: AttentionParams) -> tuple[int, int]:
    """Return how many keys before and after its own position a query sees. −1 means all keys."""
    if not spans.causal:
        return -1, -1
    return (-1 if params.window is None else params.window - 1), 0


def forward(q: Tensor, k: Tensor, v: Tensor, spans: Spans, params: AttentionParams) -> Result:
    left, right = window_of(spans, params)
    return torch.ops.aten._flash_attention_forward(
        q, k, v, spans.cu_q, spans.cu_k, *longest(spans), 0.0, spans.causal, False,
        scale=params.scale, window_size_left=left, window_size_right=right,
    )[:2]  # fmt: skip


def backward(grad: Tensor, saved: Saved, spans: Spans, params: AttentionParams) -> Gradients:
    left, right = window_of(spans, params)
    # Pass an unused random state, because the kernel reads it only for dropout.
    state = torch.empty(2, dtype=torch.uint64, device=grad.device)
    return torch.ops.aten._flash_attention_backward(
        grad, *saved[:4], saved.lse.contiguous(), spans.cu_q, spans.cu_k, *longest(spans), 0.0,
        spans.causal, state, state[:0], scale=params.scale, window_size_left=left,
        window_size_right=right,
    )  # fmt: skip
