"""torch's CPU FlashAttention over spans, a call for each block of similar lengths; not fp16.

It takes (N, H, L, D). Where every query sees every key (completions on their prompt), the query
heads of a key head are laid one after the other as more queries of it: no copy of the keys.
"""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_fast.attention.kernels.kernel import Gradients, Result, Saved, over_blocks
from grpo_fast.attention.spans import Rule

_ops = torch.ops.aten


def _forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, rule: Rule) -> Result:
    if causal and q.shape[1] != k.shape[1]:  # this kernel aligns them at the top
        raise ValueError("spans: expected as many keys as queries in a causal span")
    fold, *heads = _heads(q, k, v, causal)
    part, lse = _ops._scaled_dot_product_flash_attention_for_cpu(
        _folded(q, fold), *heads, 0.0, causal, scale=rule.scale
    )
    return _folded(part, fold), _folded(lse[..., None], fold)[..., 0]


def _backward(grad: Tensor, saved: Saved, causal: bool, rule: Rule) -> Gradients:
    q, k, v, out, lse = saved
    fold, *heads = _heads(q, k, v, causal)
    dq, dk, dv = _ops._scaled_dot_product_flash_attention_for_cpu_backward(
        _folded(grad, fold), _folded(q, fold), *heads, _folded(out, fold),
        _folded(lse[..., None], fold)[..., 0], 0.0, causal, scale=rule.scale,
    )  # fmt: skip
    return _folded(dq, fold), dk.transpose(1, 2), dv.transpose(1, 2)


def _heads(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[int, Tensor, Tensor]:
    """How many query heads are one; k and v (N, heads, S, D), repeated to H heads if causal."""
    groups = q.shape[2] // k.shape[2]
    if causal and groups > 1:
        k, v = (x.repeat_interleave(groups, dim=2) for x in (k, v))
    return 1 if causal else groups, k.transpose(1, 2), v.transpose(1, 2)


def _folded(x: Tensor, fold: int) -> Tensor:
    """(N, L, H, D) → (N, H/fold, L·fold, D), and back: it is its own inverse."""
    if fold == 1:
        return x.transpose(1, 2)
    return x.unflatten(2, (-1, fold)).permute(0, 2, 1, 3, 4).flatten(2, 3)


forward, backward = over_blocks(_forward, _backward)
