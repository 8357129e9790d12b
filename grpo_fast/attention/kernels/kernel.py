"""The interface of every varlen attention kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor


class Kernel(NamedTuple):
    """Attention over `Spans`, forward and backward apart, so that parts can be merged between them.

    Attributes:
        name: for the log.
        forward: (q (Tq, H, D), k (Tk, H_kv, D), v, spans, rule) → output (Tq, H, D), lse (H, Tq) in
            fp32 or better.
        backward: (grad, q, k, v, out, lse, spans, rule) → dq, dk, dv; out and lse may be merged
            with other keys' ones.
    """

    name: str
    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]
