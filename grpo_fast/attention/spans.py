"""The spans of one varlen attention call: span i of the queries attends to span i of the keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

# Spans at least this long relative to the longest of their block share one padded attention call.
# Padding costs attention work only (quadratic, small next to the MLPs); a call per span costs
# Python and OpenMP start-up.
BLOCK_FILL = 0.75


class Rule(NamedTuple):
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
    def seen(self) -> tuple[Spans, Tensor]:
        sizes = zip(self.queries, self.keys, strict=True)
        queries, keys = zip(*(pair for pair in sizes if pair[0]), strict=True)
        seen = torch.tensor(self.queries) > 0
        rows = seen.repeat_interleave(torch.tensor(self.keys)).nonzero()[:, 0].to(self.cu_k.device)
        return Spans.of(queries, keys, self.cu_k.device, causal=self.causal), rows

    @cached_property
    def blocks(self) -> list[tuple[Rows, Rows]]:
        """Spans of similar shape as one padded block of queries and one of keys, longest first;
        for kernels that take equal lengths. Keys without queries are left out.
        """
        sides = [(lengths, (0, *accumulate(lengths))) for lengths in (self.queries, self.keys)]
        stacks: list[list[int]] = []
        spans = [s for s, queries in enumerate(self.queries) if queries]
        for span in sorted(spans, key=lambda s: (self.queries[s] - self.keys[s], -self.queries[s])):
            if not stacks or not self._fits(span, stacks[-1][0]):
                stacks.append([])
            stacks[-1].append(span)
        blocks = []
        for stack in stacks:
            runs = ([(firsts[s], lengths[s]) for s in sorted(stack)] for lengths, firsts in sides)
            queries, keys = (Rows.of(x, self.cu_q.device) for x in runs)
            blocks.append((queries, keys))
        return blocks

    def _fits(self, span: int, longest: int) -> bool:
        """Padding stands at the end, where only causal order keeps it out of sight."""
        shapes = {(self.queries[s], self.keys[s]) for s in (span, longest)}
        if not self.causal:
            return len(shapes) == 1
        is_similar = self.queries[span] >= BLOCK_FILL * self.queries[longest]
        return is_similar and len({keys - queries for queries, keys in shapes}) == 1


@dataclass(frozen=True)
class Rows:
    """N runs of rows, padded to the longest run, L: how to stack them and how to put them back."""

    count: int  # N
    length: int  # L
    run: slice | None  # the rows, where they are one run without padding: views instead of copies
    # (N*L,) int64: row of each slot; a padding slot repeats the last row of its run.
    gather: Tensor | None = None
    slots: Tensor | None = None  # (rows,) int64: the slots that are not padding
    rows: Tensor | None = None  # (rows,) int64: the row of each of `slots`

    @classmethod
    def of(cls, runs: Sequence[tuple[int, int]], device: torch.device) -> Rows:
        longest = max(n for _, n in runs)
        start = runs[0][0]
        if all((first, n) == (start + i * longest, longest) for i, (first, n) in enumerate(runs)):
            return cls(len(runs), longest, slice(start, start + len(runs) * longest))
        first, length = (torch.tensor(x)[:, None] for x in zip(*runs, strict=True))
        offset = torch.arange(longest)[None]
        gather = (first + torch.minimum(offset, length - 1)).reshape(-1)
        slots = (offset < length).reshape(-1).nonzero()[:, 0]
        places = (x.to(device) for x in (gather, slots, gather[slots]))
        return cls(len(runs), longest, None, *places)

    def stack(self, x: Tensor) -> Tensor:
        """(T, …) → (N, L, …); padding repeats a row."""
        rows = x[self.run] if self.run is not None else x.index_select(0, self.gather)
        return rows.unflatten(0, (self.count, self.length))

    def stack_zero_padded(self, x: Tensor) -> Tensor:
        """(T, …) → (N, L, …); padding is zero."""
        if self.run is not None:
            return self.stack(x)
        out = x.new_zeros(self.count * self.length, *x.shape[1:])
        out.index_copy_(0, self.slots, x.index_select(0, self.rows))
        return out.unflatten(0, (self.count, self.length))

    def put_(self, x: Tensor, block: Tensor) -> None:
        """Write the block's real rows (N, L, …) into x (T, …)."""
        flat = block.flatten(0, 1)
        if self.run is not None:
            x[self.run] = flat
        else:
            x.index_copy_(0, self.rows, flat.index_select(0, self.slots))
