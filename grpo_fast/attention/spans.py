"""Spans, the ranges of consecutive queries and keys in a varlen attention call.

The queries of span i attend to the keys of span i.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.types import Device


class AttentionParams(NamedTuple):
    """Parameters of softmax(mask(softcap(scale·q·kᵀ))).

    Attributes:
        scale: number by which the scores are multiplied.
        window: maximum number of keys that a query attends to. None: all keys.
        softcap: bound c, which turns each score s into c·tanh(s/c). None: no bound.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None


@dataclass(frozen=True)
class Spans:
    """N consecutive spans of queries, each with a span of keys.

    Attributes:
        cu_q: (N+1,), int32, contiguous, on the device. Offsets of the query spans.
        cu_k: (N+1,), int32, contiguous, on the device. Offsets of the key spans.
        queries: lengths of the query spans, on the host.
        keys: lengths of the key spans, on the host.
        causal: if True, spans are aligned at the bottom right, as in FlashAttention. The last query
            attends to all keys of its span, and the query before it to all keys but one. If False,
            every query attends to all keys of its span.
    """

    cu_q: Tensor  # (N+1,) int32, contiguous, on the device
    cu_k: Tensor  # (N+1,) int32, contiguous, on the device
    queries: tuple[int, ...]  # N lengths, on the host
    keys: tuple[int, ...]
    causal: bool

    @classmethod
    def of(
        cls, queries: Sequence[int], keys: Sequence[int], device: Device = "cpu", *, causal: bool
    ) -> Spans:
        """Build spans from their lengths.

        A span of keys may have no queries, but a span of queries must have keys.
        """
        cu_q, cu_k = (
            torch.tensor([0, *accumulate(x)], dtype=torch.int32, device=device)
            for x in (queries, keys)
        )
        return cls(cu_q, cu_k, tuple(queries), tuple(keys), causal)

    @cached_property
    def with_queries(self) -> tuple[Spans, Tensor]:
        """Return the spans that have queries, and the indices of their rows of keys (1-D int64)."""
        sizes = zip(self.queries, self.keys, strict=True)
        queries, keys = zip(*(pair for pair in sizes if pair[0]), strict=True)
        seen = torch.tensor(self.queries) > 0
        rows = seen.repeat_interleave(torch.tensor(self.keys)).nonzero()[:, 0].to(self.cu_k.device)
        return Spans.of(queries, keys, self.cu_k.device, causal=self.causal), rows

    @cached_property
    def rows(self) -> list[tuple[slice, slice]]:
        """Return a pair (slice of queries, slice of keys) for each span that has queries."""
        ends = ((0, *accumulate(lengths)) for lengths in (self.queries, self.keys))
        sides = ([slice(*pair) for pair in pairwise(x)] for x in ends)
        return [span for span, n in zip(zip(*sides, strict=True), self.queries, strict=True) if n]
