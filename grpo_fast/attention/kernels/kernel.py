"""The contract of a varlen attention kernel, whoever made it; kernels for spans of equal length."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from grpo_fast.attention.layout import Call
from grpo_fast.attention.spans import Rule, Spans

Result = tuple[Tensor, Tensor]  # output and lse
Gradients = tuple[Tensor, Tensor, Tensor]  # dq, dk, dv


class Saved(NamedTuple):
    """Inputs and results of a forward pass, as its backward pass reads them."""

    q: Tensor  # (Tq, H, D)
    k: Tensor  # (Tk, H_kv, D)
    v: Tensor  # (Tk, H_kv, D)
    out: Tensor  # (Tq, H, D)
    lse: Tensor  # (H, Tq)

    def part(self, call: Call) -> Saved:
        at, k, v = call.queries, call.take(self.k), call.take(self.v)
        return Saved(self.q[at], k, v, self.out[at], self.lse[:, at])


class Kernel(NamedTuple):
    """Attention over `Spans`, forward and backward apart, so that parts can be merged between them.

    A span of keys may have no queries: its dk and dv are zero. The reverse does not occur.

    Attributes:
        name: for the log.
        forward: (q (Tq, H, D), k (Tk, H_kv, D), v, spans, rule) → output (Tq, H, D), lse (H, Tq) in
            fp32 or better.
        backward: (grad (Tq, H, D), saved, spans, rule) → dq, dk, dv; the output and lse in `saved`
            may be merged with those of other keys.
        takes_copies: a causal span may have more keys than queries.
    """

    name: str
    forward: Callable[..., Result]
    backward: Callable[..., Gradients]
    takes_copies: bool = True


def over_blocks(
    forward: Callable[..., Result], backward: Callable[..., Gradients]
) -> tuple[Callable[..., Result], Callable[..., Gradients]]:
    """The two functions of a kernel for N spans of equal length: q (N, L, H, D), k and v (N, S,
    H_kv, D), causal or not. Autocast, which would take fp32 products in 16 bits, is off.

    Args:
        forward: (q, k, v, causal, rule) → output (N, L, H, D), lse (N, L, H) in fp32 or better.
        backward: (grad, (q, k, v, output, lse), causal, rule) → dq (N, L, H, D), dk and dv
            (N, S, H_kv or H, D).
    """

    def run(q: Tensor, k: Tensor, v: Tensor, spans: Spans, rule: Rule) -> Result:
        wide = torch.promote_types(q.dtype, torch.float32)
        out, lse = torch.empty_like(q), q.new_empty(q.shape[:2], dtype=wide)
        with torch.autocast(q.device.type, enabled=False):
            for queries, keys in spans.blocks:
                part = forward(queries.stack(q), keys.stack(k), keys.stack(v), spans.causal, rule)
                queries.put_(out, part[0].to(q.dtype))
                queries.put_(lse, part[1])
        return out, lse.t()

    def back(grad: Tensor, saved: Saved, spans: Spans, rule: Rule) -> Gradients:
        q, k, v, out, lse = saved
        dq, dk, dv = (torch.empty_like(x) for x in saved[:3])
        if 0 in spans.queries:
            dk.zero_(), dv.zero_()
        with torch.autocast(q.device.type, enabled=False):
            for queries, keys in spans.blocks:
                inputs = queries.stack(q), keys.stack(k), keys.stack(v)
                results = queries.stack(out), queries.stack(lse.t())
                stacked = queries.stack_zero_padded(grad)
                part = backward(stacked, Saved(*inputs, *results), spans.causal, rule)
                queries.put_(dq, part[0].to(q.dtype))
                for target, x in zip((dk, dv), part[1:], strict=True):
                    heads = x.unflatten(2, (k.shape[1], -1)).sum(3)
                    keys.put_(target, heads.to(k.dtype))
        return dq, dk, dv

    return run, back
