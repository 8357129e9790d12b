"""torch's CPU FlashAttention over spans, with one call per span. It does not support fp16.

The operator expects tensors of shape (1, H, L, D). In a call without a causal mask, such as that of
completions on their prompt, query heads that share a key head are folded into additional queries of
that head. This avoids a copy of the keys.
"""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_fast.attention.kernels.kernel import Gradients, Result, Saved, over_spans
from grpo_fast.attention.layout import AttentionParams

_ops = torch.ops.aten


def _forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, params: AttentionParams) -> Result:
    fold, *heads = _heads(q, k, v, causal)
    part, lse = _ops._scaled_dot_product_flash_attention_for_cpu(
        _folded(q, fold), *heads, 0.0, causal, scale=params.scale
    )
    return _unfolded(part, fold), _unfolded(lse[..., None], fold)[..., 0].t()


def _backward(grad: Tensor, saved: Saved, causal: bool, params: AttentionParams) -> Gradients:
    q, k, v, out, lse = saved
    fold, *heads = _heads(q, k, v, causal)
    dq, dk, dv = _ops._scaled_dot_product_flash_attention_for_cpu_backward(
        _folded(grad, fold), _folded(q, fold), *heads, _folded(out, fold),
        _folded(lse.t()[..., None], fold)[..., 0], 0.0, causal, scale=params.scale,
    )  # fmt: skip
    return _unfolded(dq, fold), dk[0].transpose(0, 1), dv[0].transpose(0, 1)


def _heads(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[int, Tensor, Tensor]:
    """Return the number of query heads to fold, and k and v as (1, heads, S, D).

    A causal call cannot fold heads, because folding changes the order of the queries. Its keys are
    repeated to H heads instead.
    """
    groups = q.shape[1] // k.shape[1]
    if causal and groups > 1:
        k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
    return 1 if causal else groups, k.transpose(0, 1)[None], v.transpose(0, 1)[None]


def _folded(x: Tensor, fold: int) -> Tensor:
    """Fold query heads into queries: reshape (L, H, D) to (1, H/fold, L·fold, D)."""
    return x.unflatten(1, (-1, fold)).transpose(0, 1).flatten(1, 2)[None]


def _unfolded(x: Tensor, fold: int) -> Tensor:
    """Undo `_folded`: reshape (1, H/fold, L·fold, D) to (L, H, D)."""
    return x[0].unflatten(1, (-1, fold)).transpose(0, 1).flatten(1, 2)


forward, backward = over_spans(_forward, _backward)
