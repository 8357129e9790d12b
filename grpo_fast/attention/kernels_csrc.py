"""Attention over spans in C++ for the CPU (csrc/api/attention.cpp): fp32, no padding, no copies of
keys for the query heads that share them.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from grpo_fast.attention.spans import Rule, Spans
from grpo_fast.kernels.cpu import loader
from grpo_fast.kernels.types import detached


@functools.cache
def _door(name: str) -> Any:
    loader.require("attention")
    return getattr(torch.ops.grpo_fast_attention, name).default


def forward(q: Tensor, k: Tensor, v: Tensor, spans: Spans, rule: Rule) -> tuple[Tensor, Tensor]:
    """(Tq, H, D), (Tk, H_kv, D) twice → output (Tq, H, D) and lse (H, Tq), all fp32."""
    out, lse = _door("attention")(*map(_lying, (q, k, v)), *_places(spans), rule.scale)
    return out, lse


def backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    spans: Spans,
    rule: Rule,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v; `out` and `lse` may be merged with those of other keys."""
    given = map(_lying, (grad, q, k, v, out))
    return _door("attention_backward")(*given, detached(lse), *_places(spans), rule.scale)


def _places(spans: Spans) -> tuple[Tensor, Tensor, bool]:
    return spans.cu_q, spans.cu_k, spans.causal


def _lying(x: Tensor) -> Tensor:
    """As the kernels read it: neighbours of a head are neighbours in memory."""
    return detached(x) if x.stride(-1) == 1 else detached(x).contiguous()
