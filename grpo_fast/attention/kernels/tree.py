"""Attention of a packed row: each segment causally on itself and on all its ancestors.

Without parents this is one varlen call. In a tree there is one more for every distance to an
ancestor (`TreeLayout.calls`), merged by their log-sum-exps:

    (o₁, l₁) = every segment on itself, causal
    (o₂, l₂) = q[segments with a j-th ancestor] on k, v[j-th ancestors], not causal
    l = logaddexp(l₁, l₂)        o = o₁·exp(l₁ − l) + o₂·exp(l₂ − l)

The backward pass runs all partial backwards with the *merged* (o, l): then P = exp(S − l) and D =
rowsum(dO∘O) are those of the whole softmax, and the sums of the parts are the exact gradients. No
gradient goes through the log-sum-exps: FlashAttention drops it, so merging differentiated outputs
would give wrong dq and dk without a word.

A sliding window moves with each row, which a call on a whole ancestor cannot express. Then one
causal call has copies of the window's keys in front of each segment's own (`TreeLayout.copies`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from grpo_fast.attention.kernels.kernel import Kernel, Saved
from grpo_fast.attention.layout import Call, Copies, TreeLayout
from grpo_fast.attention.spans import AttentionParams

Work = tuple[tuple[Call, ...], AttentionParams, Kernel]
# Numbers of the output that are merged at once: bounds the fp32 copies of two 16-bit outputs.
MERGE_NUMBERS = 2**25


def attend(
    q: Tensor, k: Tensor, v: Tensor, layout: TreeLayout, params: AttentionParams, *, kernel: Kernel
) -> Tensor:
    """(T, H, D), (T, H_kv, D) twice → (T, H, D) by one kernel; differentiable once."""
    calls = layout.calls
    if params.window is not None and layout.has_tree:
        calls = layout.window_calls(params.window)
    return PackedAttention.apply(q, k, v, (calls, params, kernel))


class PackedAttention(torch.autograd.Function):
    """The forward pass keeps q, k, v, the merged output and its log-sum-exp."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, work: Work) -> Tensor:
        (first, *others), params, kernel = ctx.work = work
        out, lse = kernel.forward(q, first.take(k), first.take(v), first.spans, params)
        out = _wide(out, others)
        for call in others:  # no name for a part: it would live on beside the next
            at, inputs = call.queries, (call.take(k), call.take(v), call.spans, params)
            merge_(out[at], lse[:, at], *kernel.forward(q[at], *inputs))
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError("packed attention has no double backward (create_graph=True)")
        (first, *others), params, kernel = ctx.work
        grad, saved = grad.contiguous(), Saved(*ctx.saved_tensors)
        grads = list(kernel.backward(grad, saved.part(first), first.spans, params))
        for n in range(3):  # in place: what is replaced is free before the next one's turn
            if n and isinstance(first.keys, Copies):
                grads[n] = first.keys.sum_copies(grads[n])
            grads[n] = _wide(grads[n], others)
        for call in others:
            inputs = grad[call.queries], saved.part(call), call.spans, params
            wholes = zip(grads, (call.queries, call.keys, call.keys), strict=True)
            for (whole, rows), part in zip(wholes, kernel.backward(*inputs), strict=True):
                whole[rows] += part
        return *(x.to(saved.q.dtype) for x in grads), None


def _wide(x: Tensor, merges: list[Call]) -> Tensor:
    """fp32 where several parts are added: rounding to 16 bits each time would add up."""
    return x if len(merges) < 2 else x.to(torch.promote_types(x.dtype, torch.float32))


def merge_(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> None:
    """Merge attention over two disjoint sets of keys into the first: out (T, H, D), lse (H, T)."""
    # Of both parts' own lse: it is overwritten last.
    weight = torch.sigmoid(other_lse - lse).t()[..., None]
    rows = max(1, MERGE_NUMBERS // out[0].numel())
    for one, two, share in zip(out.split(rows), other.split(rows), weight.split(rows), strict=True):
        one.copy_(torch.lerp(one.to(share.dtype), two.to(share.dtype), share))
    lse.copy_(torch.logaddexp(lse, other_lse))
