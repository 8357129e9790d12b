"""FlashAttention on CUDA: version 2 as built into torch, and the packages for versions 2, 3 and 4.

Inputs are 16-bit tensors q (Tq, H, D), k and v (Tk, H_kv, D), with D a multiple of 8 up to 256, and
int32 offsets of the spans. Outputs are the attention output and lse (H, Tq) in fp32. Each function
calls the operator that the autograd class of its library also calls. The backward pass can
therefore receive an output and lse that were merged from several calls.

The signatures match torch 2.11 to 2.13, flash-attn 2.8, flash_attn_interface (FA3) and
flash_attn.cute (FA4). The backward pass is deterministic if torch uses deterministic algorithms.
"""

from __future__ import annotations

from importlib import import_module

import torch
from torch import Tensor

from grpo_fast.attention.kernels.spans import Gradients, Kernel, Result, Saved
from grpo_fast.attention.layout import AttentionParams, Spans


def longest(spans: Spans) -> tuple[int, int]:
    """Return the length of the longest query span and the length of the longest key span.

    The first length is at least 2, because FA2 would use its decoding path for a single query.
    """
    return max(2, *spans.queries), max(spans.keys)


def window_of(spans: Spans, params: AttentionParams) -> tuple[int, int]:
    """Return how many keys before and after its own position a query sees. −1 means all keys."""
    if not spans.causal:
        return -1, -1
    return (-1 if params.window is None else params.window - 1), 0


# The next two functions use torch's built-in FlashAttention 2.
def aten_forward(q: Tensor, k: Tensor, v: Tensor, spans: Spans, params: AttentionParams) -> Result:
    left, right = window_of(spans, params)
    return torch.ops.aten._flash_attention_forward(
        q, k, v, spans.cu_q, spans.cu_k, *longest(spans), 0.0, spans.causal, False,
        scale=params.scale, window_size_left=left, window_size_right=right,
    )[:2]  # fmt: skip


def aten_backward(grad: Tensor, saved: Saved, spans: Spans, params: AttentionParams) -> Gradients:
    left, right = window_of(spans, params)
    # Pass an unused random state, because the kernel reads it only for dropout.
    state = torch.empty(2, dtype=torch.uint64, device=grad.device)
    return torch.ops.aten._flash_attention_backward(
        grad, *saved[:4], saved.lse.contiguous(), spans.cu_q, spans.cu_k, *longest(spans), 0.0,
        spans.causal, state, state[:0], scale=params.scale, window_size_left=left,
        window_size_right=right,
    )  # fmt: skip


# The next two functions use the package flash-attn (FA2).
def fa2_forward(q: Tensor, k: Tensor, v: Tensor, spans: Spans, params: AttentionParams) -> Result:
    return import_module("flash_attn.flash_attn_interface")._flash_attn_varlen_forward(
        q, k, v, dropout_p=0.0, causal=spans.causal, **_options(spans, params)
    )[:2]


def fa2_backward(grad: Tensor, saved: Saved, spans: Spans, params: AttentionParams) -> Gradients:
    # Allocate the gradients here, because the library writes them into tensors of the caller.
    gradients = _like(*saved[:3])
    import_module("flash_attn.flash_attn_interface")._flash_attn_varlen_backward(
        grad, *saved[:4], saved.lse.contiguous(), *gradients, dropout_p=0.0, causal=spans.causal,
        alibi_slopes=None, **_determinism(), **_options(spans, params),
    )  # fmt: skip
    return gradients


# The next two functions use flash_attn_interface (FA3).
def fa3_forward(q: Tensor, k: Tensor, v: Tensor, spans: Spans, params: AttentionParams) -> Result:
    return import_module("flash_attn_interface")._flash_attn_forward(
        q, k, v, causal=spans.causal, **_options(spans, params)
    )[:2]


def fa3_backward(grad: Tensor, saved: Saved, spans: Spans, params: AttentionParams) -> Gradients:
    dq, dk, dv = _like(*saved[:3])
    import_module("flash_attn_interface")._flash_attn_backward(
        grad, *saved[:4], saved.lse.contiguous(), dq=dq, dk=dk, dv=dv, is_causal=spans.causal,
        **_determinism(), **_options(spans, params),
    )  # fmt: skip
    return dq, dk, dv


# The next two functions use flash_attn.cute (FA4). It represents a window over all keys by None,
# and sets the right side of a causal window itself.
def fa4_forward(q: Tensor, k: Tensor, v: Tensor, spans: Spans, params: AttentionParams) -> Result:
    return import_module("flash_attn.cute.interface")._flash_attn_fwd(
        q, k, v, causal=spans.causal, return_lse=True, **_options(spans, params, is_fa4=True)
    )[:2]


def fa4_backward(grad: Tensor, saved: Saved, spans: Spans, params: AttentionParams) -> Gradients:
    if 0 in spans.queries:
        # Drop the spans that have keys but no queries, because early releases of FA4 hang on them
        # or store undefined values.
        inner, rows = spans.with_queries
        seen = saved._replace(k=saved.k[rows], v=saved.v[rows])
        dq, *parts = fa4_backward(grad, seen, inner, params)
        dk, dv = (torch.zeros_like(saved.k).index_copy_(0, rows, x) for x in parts)
        return dq, dk, dv
    return import_module("flash_attn.cute.interface")._flash_attn_bwd(
        *saved[:4], grad, saved.lse.contiguous(), causal=spans.causal, **_determinism(),
        **_options(spans, params, is_fa4=True),
    )[:3]  # fmt: skip


def _options(spans: Spans, params: AttentionParams, *, is_fa4: bool = False) -> dict[str, object]:
    max_q, max_k = longest(spans)
    left, right = window_of(spans, params)
    options = {
        "cu_seqlens_q": spans.cu_q, "cu_seqlens_k": spans.cu_k,
        "max_seqlen_q": max_q, "max_seqlen_k": max_k, "softmax_scale": params.scale,
        "window_size_left": None if is_fa4 and left < 0 else left,
        "window_size_right": None if is_fa4 and left < 0 else right,
    }  # fmt: skip
    return options if is_fa4 else {**options, "softcap": params.softcap or 0.0}


def _determinism() -> dict[str, bool]:
    return {"deterministic": torch.are_deterministic_algorithms_enabled()}


def _like(*tensors: Tensor) -> Gradients:
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in tensors)
    return dq, dk, dv


aten = Kernel(aten_forward, aten_backward)
fa2 = Kernel(fa2_forward, fa2_backward)
fa3 = Kernel(fa3_forward, fa3_backward)
fa4 = Kernel(fa4_forward, fa4_backward)
