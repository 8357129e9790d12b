"""Attention of a packed row: each segment causally on itself, completions on their shared prompt as
well.

Without sharing this is one varlen call. With it there are two, merged by their log-sum-exps:

    (o₁, l₁) = every segment on itself, causal
    (o₂, l₂) = q[completions] on k[prompts], v[prompts], not causal
    l = logaddexp(l₁, l₂)        o = o₁·exp(l₁ − l) + o₂·exp(l₂ − l)

The backward pass runs both partial backwards with the *merged* (o, l): then P = exp(S − l) and D =
rowsum(dO∘O) are those of the whole softmax, and the sums of both parts are the exact gradients. No
gradient goes through the log-sum-exps: FlashAttention drops it, so merging differentiated outputs
would give wrong dq and dk without a word.

A sliding window moves with each completion, which one call on the prompt cannot express. Then every
completion gets a copy of the prompt's last window−1 keys in front of its own (`gathered`), and one
causal call does it all.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from grpo_fast.attention.kernels.kernel import Kernel
from grpo_fast.attention.layout import PackedLayout
from grpo_fast.attention.spans import Rule

# Numbers of the output that are merged at once: fp32 copies of two 16-bit outputs would be twice
# their memory.
MERGE_NUMBERS = 2**25


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: PackedLayout,
    rule: Rule,
    *,
    kernel: Kernel,
    gather: bool | None = None,
) -> Tensor:
    """(T, H, D), (T, H_kv, D) twice → (T, H, D) by one kernel; differentiable once.

    `gather`: copy the prompts' keys instead of merging two calls; None does so where a window needs
        it.
    """
    if gather is None:
        gather = bool(layout.sharing) and rule.window is not None
    return PackedAttention.apply(q, k, v, layout, rule, kernel, gather)


class PackedAttention(torch.autograd.Function):
    """The forward pass keeps q, k, v, the merged output and its log-sum-exp."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layout: PackedLayout,
        rule: Rule,
        kernel: Kernel,
        gather: bool,
    ) -> Tensor:
        function = _forward_gathered if gather else _forward
        out, lse = function(q, k, v, layout, rule, kernel)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.call = layout, rule, kernel, gather
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "grpo_fast: packed attention has no double backward (create_graph=True)"
            )
        *call, gather = ctx.call
        function = _backward_gathered if gather else _backward
        return (*function(grad.contiguous(), *ctx.saved_tensors, *call), None, None, None, None)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, layout: PackedLayout, rule: Rule, kernel: Kernel
) -> tuple[Tensor, Tensor]:
    out, lse = kernel.forward(q, k, v, layout.on_itself, rule)
    if layout.sharing:
        rows, n = layout.completion_rows, layout.prompt_rows
        other, other_lse = kernel.forward(q[rows], k[:n], v[:n], layout.on_prompts, rule)
        merge_(out[rows], lse[:, rows], other, other_lse)
    return out, lse


def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, layout: PackedLayout,
    rule: Rule, kernel: Kernel,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    dq, dk, dv = kernel.backward(grad, q, k, v, out, lse, layout.on_itself, rule)
    if layout.sharing:
        rows, n = layout.completion_rows, layout.prompt_rows
        parts = kernel.backward(
            grad[rows], q[rows], k[:n], v[:n], out[rows], lse[:, rows], layout.on_prompts, rule
        )
        for whole, part in zip((dq[rows], dk[:n], dv[:n]), parts, strict=True):
            whole += part
    return dq, dk, dv


def merge_(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> None:
    """Merge attention over two disjoint sets of keys into the first: out (T, H, D), lse (H, T)."""
    weight = torch.sigmoid(other_lse - lse).t()[..., None]
    rows = max(1, MERGE_NUMBERS // out[0].numel())
    for one, two, share in zip(out.split(rows), other.split(rows), weight.split(rows), strict=True):
        one.copy_(torch.lerp(one.to(share.dtype), two.to(share.dtype), share))
    lse.copy_(torch.logaddexp(lse, other_lse))


def _forward_gathered(
    q: Tensor, k: Tensor, v: Tensor, layout: PackedLayout, rule: Rule, kernel: Kernel
) -> tuple[Tensor, Tensor]:
    gathered = layout.gathered(rule.window)
    keys, values = (x.index_select(0, gathered.rows) for x in (k, v))
    return kernel.forward(q, keys, values, gathered.spans, rule)


def _backward_gathered(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, layout: PackedLayout,
    rule: Rule, kernel: Kernel,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    gathered = layout.gathered(rule.window)
    keys, values = (x.index_select(0, gathered.rows) for x in (k, v))
    dq, dk, dv = kernel.backward(grad, q, keys, values, out, lse, gathered.spans, rule)
    return dq, gathered.put_back(dk), gathered.put_back(dv)
