"""torch's CPU FlashAttention over spans: one call for each block of spans of similar length, fp32,
fp64 and bf16.

`_scaled_dot_product_flash_attention_for_cpu` takes (N, H, L, D) and skips the keys above the
diagonal. Where every query sees every key (completions on their prompt), the query heads that share
a key head are laid one after the other as more queries of that head: no copy of the keys, and
longer matrix products.
"""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_fast.attention.kernels.kernel import Saved, empty_gradients
from grpo_fast.attention.spans import Block, Rule, Spans
from grpo_fast.kernels.workspace import unset

_ops = torch.ops.aten


def forward(q: Tensor, k: Tensor, v: Tensor, spans: Spans, rule: Rule) -> tuple[Tensor, Tensor]:
    """(Tq, H, D), (Tk, H_kv, D) twice → output (Tq, H, D) and lse (H, Tq) in fp32 or better."""
    if spans.causal and spans.queries != spans.keys:
        raise ValueError(
            "spans: expected as many keys as queries in a causal span, this kernel aligns them at "
            "the top"
        )
    out, lse = unset(torch.empty_like, q), None
    for block in spans.blocks:
        part, part_lse = _ops._scaled_dot_product_flash_attention_for_cpu(
            *_stack(block, q, k, v, spans.causal), 0.0, spans.causal, scale=rule.scale
        )
        if lse is None:
            lse = unset(part_lse.new_empty, q.shape[:2])
        block.queries.put_(out, _unfold(part, block, q))
        block.queries.put_(lse, _unfold(part_lse[..., None], block, q)[..., 0])
    return out, lse.t()


def backward(grad: Tensor, saved: Saved, spans: Spans, rule: Rule) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v; the output and lse may be merged with those of other keys."""
    q, k, v, out, lse = saved
    dq, dk, dv = empty_gradients(saved, spans)
    groups = q.shape[1] // k.shape[1]
    for block in spans.blocks:
        qs, ks, vs = _stack(block, q, k, v, spans.causal)
        fold = groups if not spans.causal else 1
        gs = _fold(block.queries.stack_zero_padded(grad), fold)
        os = _fold(block.queries.stack(out), fold)
        ls = _fold(block.queries.stack(lse.t())[..., None], fold)[..., 0]
        grads = _ops._scaled_dot_product_flash_attention_for_cpu_backward(
            gs, qs, ks, vs, os, ls, 0.0, spans.causal, scale=rule.scale
        )
        block.queries.put_(dq, _unfold(grads[0], block, q))
        for target, part in zip((dk, dv), grads[1:], strict=True):
            part = part.transpose(1, 2)
            if spans.causal and groups > 1:
                part = part.unflatten(2, (-1, groups)).sum(3)
            block.keys.put_(target, part)
    return dq, dk, dv


def _stack(block: Block, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, ...]:
    """Causal: q as (N, H, L, D), k and v repeated to H heads. Else: q as (N, H_kv, L·H/H_kv, D), k
    and v unchanged.
    """
    groups = q.shape[1] // k.shape[1]
    qs, ks, vs = block.queries.stack(q), block.keys.stack(k), block.keys.stack(v)
    if causal and groups > 1:
        ks, vs = (x.repeat_interleave(groups, dim=2) for x in (ks, vs))
    return _fold(qs, 1 if causal else groups), ks.transpose(1, 2), vs.transpose(1, 2)


def _fold(x: Tensor, groups: int) -> Tensor:
    """(N, L, H, D) → (N, H/groups, L·groups, D)."""
    n, length, heads, dim = x.shape
    if groups == 1:
        return x.transpose(1, 2)
    x = x.unflatten(2, (-1, groups)).permute(0, 2, 1, 3, 4)
    return x.reshape(n, heads // groups, length * groups, dim)


def _unfold(x: Tensor, block: Block, q: Tensor) -> Tensor:
    """The inverse of `_fold`: → (N, L, H, D)."""
    if x.shape[1] == q.shape[1]:
        return x.transpose(1, 2)
    return x.unflatten(2, (block.queries.length, -1)).permute(0, 2, 1, 3, 4).flatten(2, 3)
