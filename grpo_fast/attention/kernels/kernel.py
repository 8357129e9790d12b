"""The contract of a varlen attention kernel, whoever made it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from grpo_fast.attention.layout import Call
from grpo_fast.attention.spans import Spans
from grpo_fast.kernels.workspace import unset


class Saved(NamedTuple):
    """Inputs and results of a forward pass, as its backward pass reads them."""

    q: Tensor  # (Tq, H, D)
    k: Tensor  # (Tk, H_kv, D)
    v: Tensor  # (Tk, H_kv, D)
    out: Tensor  # (Tq, H, D)
    lse: Tensor  # (H, Tq)

    def part(self, call: Call) -> Saved:
        """The rows of one call."""
        at, k, v = call.queries, call.take(self.k), call.take(self.v)
        return Saved(self.q[at], k, v, self.out[at], self.lse[:, at])


def empty_gradients(saved: Saved, spans: Spans) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv for a kernel that goes over `spans.blocks`: unset, but zero for keys that no query
    sees.
    """
    dq, dk, dv = (unset(torch.empty_like, x) for x in saved[:3])
    if 0 in spans.queries:
        dk.zero_(), dv.zero_()
    return dq, dk, dv


class Kernel(NamedTuple):
    """Attention over `Spans`, forward and backward apart, so that parts can be merged between them.

    A span of keys may have no queries: its dk and dv are zero. The reverse does not occur.

    Attributes:
        name: for the log.
        forward: (q (Tq, H, D), k (Tk, H_kv, D), v, spans, rule) → output (Tq, H, D), lse (H, Tq) in
            fp32 or better.
        backward: (grad (Tq, H, D), saved, spans, rule) → dq, dk, dv; the output and lse in `saved`
            may be merged with those of other keys.
    """

    name: str
    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]
