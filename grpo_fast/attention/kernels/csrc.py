"""Attention over spans in C++ on the CPU (csrc/api/attention.cpp), in fp32 and without padding."""

from __future__ import annotations

from torch import Tensor

from grpo_fast.attention.kernels.kernel import Saved
from grpo_fast.attention.layout import AttentionParams, Spans
from grpo_fast.kernels.cpu import loader
from grpo_fast.kernels.types import contiguous_rows, detached


def forward(
    q: Tensor, k: Tensor, v: Tensor, spans: Spans, params: AttentionParams
) -> tuple[Tensor, Tensor]:
    """Compute attention for fp32 inputs q (Tq, H, D), k and v (Tk, H_kv, D).

    Returns:
        The output (Tq, H, D) and the log-sum-exp (H, Tq).
    """
    given = map(contiguous_rows, (q, k, v))
    operator = loader.operator("attention", "attention")
    return operator(*given, spans.cu_q, spans.cu_k, spans.causal, params.scale)


def backward(
    grad: Tensor, saved: Saved, spans: Spans, params: AttentionParams
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v.

    `saved.out` and `saved.lse` may include the results of attention calls on other keys.
    """
    given = map(contiguous_rows, (grad, *saved[:4]))
    operator = loader.operator("attention", "attention_backward")
    places = spans.cu_q, spans.cu_k, spans.causal
    return operator(*given, detached(saved.lse), *places, params.scale)
