"""The spans of one varlen attention call: span i of the queries attends to span i of the keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor


class AttentionParams(NamedTuple):
    """softmax(mask(softcap(scale·q·kᵀ))): at most `window` keys; softcap(s) = c·tanh(s/c)."""

    scale: float
    window: int | None = None
    softcap: float | None = None


@dataclass(frozen=True)
class Spans:
    """N spans of queries, one after the other, and the spans of keys that each attends to.

    `causal`: aligned at the bottom right, as FlashAttention does: the last query sees all keys of
    its span, the one before it all but one. Else every query sees all keys of its span.
    """

    cu_q: Tensor  # (N+1,) int32, contiguous, on the device
    cu_k: Tensor  # (N+1,) int32, contiguous, on the device
    queries: tuple[int, ...]  # lengths on the host
    keys: tuple[int, ...]
    causal: bool

    @classmethod
    def of(
        cls, queries: Sequence[int], keys: Sequence[int], device: Any = "cpu", *, causal: bool
    ) -> Spans:
        """Spans of these lengths; no span has queries without keys."""
        cu_q, cu_k = (
            torch.tensor([0, *accumulate(x)], dtype=torch.int32, device=device)
            for x in (queries, keys)
        )
        return cls(cu_q, cu_k, tuple(queries), tuple(keys), causal)

    @cached_property
    def with_queries(self) -> tuple[Spans, Tensor]:
        sizes = zip(self.queries, self.keys, strict=True)
        queries, keys = zip(*(pair for pair in sizes if pair[0]), strict=True)
        seen = torch.tensor(self.queries) > 0
        rows = seen.repeat_interleave(torch.tensor(self.keys)).nonzero()[:, 0].to(self.cu_k.device)
        return Spans.of(queries, keys, self.cu_k.device, causal=self.causal), rows

    @cached_property
    def rows(self) -> list[tuple[slice, slice]]:
        """The rows of queries and of keys of each span, without the spans that have no queries."""
        ends = ((0, *accumulate(lengths)) for lengths in (self.queries, self.keys))
        sides = ([slice(*pair) for pair in pairwise(x)] for x in ends)
        return [span for span, n in zip(zip(*sides, strict=True), self.queries, strict=True) if n]
