"""Interface of varlen attention kernels, and an adapter for kernels that compute one span."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from grpo_fast.attention.layout import AttentionParams, Call, Spans

Result = tuple[Tensor, Tensor]  # output and lse
Gradients = tuple[Tensor, Tensor, Tensor]  # dq, dk, dv


class Saved(NamedTuple):
    """Inputs and results of a forward pass, which the backward pass needs."""

    q: Tensor  # (Tq, H, D)
    k: Tensor  # (Tk, H_kv, D)
    v: Tensor  # (Tk, H_kv, D)
    out: Tensor  # (Tq, H, D)
    lse: Tensor  # (H, Tq)

    def part(self, call: Call) -> Saved:
        """Select the queries, keys, values and results that belong to one attention call."""
        at = call.queries
        return Saved(
            self.q[at], call.take(self.k), call.take(self.v), self.out[at], self.lse[:, at]
        )


class Kernel(NamedTuple):
    """Attention over `Spans`, with separate forward and backward functions.

    The functions are separate because the results of several calls are merged between forward and
    backward. A span of keys may have no queries, in which case its dk and dv are zero. A span of
    queries always has keys.

    Attributes:
        forward: (q (Tq, H, D), k (Tk, H_kv, D), v, spans, params) → output (Tq, H, D) and
            lse (H, Tq). lse is fp32 or fp64.
        backward: (grad (Tq, H, D), saved, spans, params) → dq, dk, dv. The output and lse in
            `saved` may include the results of calls on other keys.
    """

    forward: Callable[..., Result]
    backward: Callable[..., Gradients]


def over_spans(
    forward: Callable[..., Result], backward: Callable[..., Gradients]
) -> tuple[Callable[..., Result], Callable[..., Gradients]]:
    """Build the functions of a `Kernel` from two functions that compute a single span.

    Autocast is disabled, because it would compute fp32 products in 16 bits.

    Args:
        forward: (q (L, H, D), k (S, H_kv, D), v, causal, params) → output (L, H, D) and lse (H, L).
            lse is fp32 or fp64.
        backward: (grad (L, H, D), saved, causal, params) → dq, dk, dv. dk and dv may have as many
            heads as q.
    """

    def run(q: Tensor, k: Tensor, v: Tensor, spans: Spans, params: AttentionParams) -> Result:
        # Use fp32 for the log-sum-exps, because merging subtracts nearly equal log-sum-exps.
        acc_dtype = torch.promote_types(q.dtype, torch.float32)
        out = torch.empty_like(q)
        lse = q.new_empty(q.shape[1::-1], dtype=acc_dtype)
        with torch.autocast(q.device.type, enabled=False):
            for at, keys in spans.rows:
                out[at], lse[:, at] = forward(q[at], k[keys], v[keys], spans.causal, params)
        return out, lse

    def back(grad: Tensor, saved: Saved, spans: Spans, params: AttentionParams) -> Gradients:
        q, k, v, out, lse = saved
        dq, dk, dv = (torch.empty_like(x) for x in saved[:3])
        if 0 in spans.queries:
            dk.zero_()
            dv.zero_()
        with torch.autocast(q.device.type, enabled=False):
            for at, keys in spans.rows:
                span = Saved(q[at], k[keys], v[keys], out[at], lse[:, at])
                dq[at], *parts = backward(grad[at], span, spans.causal, params)
                # Sum the gradients of all query heads that use the same key head.
                for target, x in zip((dk, dv), parts, strict=True):
                    target[keys] = x.unflatten(1, (k.shape[1], -1)).sum(2)
        return dq, dk, dv

    return run, back
