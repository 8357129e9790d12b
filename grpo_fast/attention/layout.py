"""Where each sequence stands in a packed row: computed once per micro-batch on the host, read by
every layer.

A row of T tokens is cut into S segments. Each attends causally to itself and to all its ancestors,
at positions that go on where its parent ends. Segments stand in level order, so that their parents
ascend; childless roots (plain segments) stand last:

    rows:     [P1][P2]  [a1][a2][b1]  [a11][a12][b11]  [s1][s2]
    parents:   −1  −1     0   0   1     2    2    4      −1  −1

The segments that have an ancestor at distance j are then one run of rows, and these ancestors, in
the same order, another: attention over ancestors at one distance copies neither queries nor keys.
A shared prompt with its completions is the tree of two levels; without parents the row is packed.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from grpo_fast.attention.spans import Spans
from grpo_fast.errors import require

Built = TypeVar("Built")


class Copies(NamedTuple):
    """Rows of keys that stand several times in one call."""

    rows: Tensor  # (Tk,) int64: the row of T behind each copy
    order: Tensor  # (Tk,) int64: sorts the copies by their row
    copies: Tensor  # (T,) int64: how many each row has

    @classmethod
    def of(cls, rows: Tensor, total: int) -> Copies:
        # Stable: the gradients of a row's copies are added in one order, the same bits every time.
        return cls(rows, rows.argsort(stable=True), rows.bincount(minlength=total))

    def sum_copies(self, grad: Tensor) -> Tensor:
        """(Tk, …) gradients of the copies → (T, …), summed in their order, in fp32 or better."""
        ordered = grad[self.order].to(torch.promote_types(grad.dtype, torch.float32))
        summed = torch.segment_reduce(ordered, "sum", lengths=self.copies, initial=0, unsafe=True)
        return summed.to(grad.dtype)


class Call(NamedTuple):
    """One varlen call over parts of the row."""

    spans: Spans
    queries: slice  # rows
    keys: slice | Copies  # rows

    def take(self, x: Tensor) -> Tensor:
        """The rows (Tk, …) of keys or values: a view, or the copies."""
        return x[self.keys] if isinstance(self.keys, slice) else x[self.keys.rows]


@dataclass(frozen=True)
class TreeLayout:
    """Segments of one packed row of T tokens: `model(..., packed_layout=...)`."""

    cu_seqlens: Tensor  # (S+1,) int32, contiguous, on the model's device
    lengths: tuple[int, ...]  # the same on the host: no layer has to wait for the device
    parents: tuple[int, ...]  # the segment before each; −1 for none

    @classmethod
    def of(
        cls,
        lengths: Sequence[int],
        device: torch.device | str = "cpu",
        *,
        parents: Sequence[int] = (),
    ) -> TreeLayout:
        """The layout of segments of these lengths, one after the other.

        `parents`: the segment that each continues, −1 for none; ascending up to the last segment
            that has one. Empty: no segment continues another.

        Raises ValueError for an empty segment (FlashAttention gives it lse = +inf), for parents in
            another order or behind their children, and for another number of them.
        """
        fits, came = lengths and min(lengths) >= 1, list(lengths)[:8]
        require(fits, "lengths", "at least one segment and none empty", came)
        parents, count = tuple(parents) or (-1,) * len(lengths), len(lengths)
        fits, expected = len(parents) == count, f"one for each of {count} segments"
        require(fits, "parents", expected, len(parents))
        trees = max((s + 1 for s, parent in enumerate(parents) if parent != -1), default=0)
        for segment, (above, parent) in enumerate(pairwise((-1, *parents[:trees]))):
            expected = f"an earlier segment than {segment} and none before {above}, the parent of "
            expected += "the segment in front (level order)"
            require(above <= parent < segment, "parents", expected, parent)
        ends = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
        return cls(ends, tuple(lengths), parents)

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """First row of each segment, and T."""
        return (0, *accumulate(self.lengths))

    @property
    def total(self) -> int:
        return self.starts[-1]

    @cached_property
    def has_tree(self) -> bool:
        return max(self.parents) >= 0

    @cached_property
    def prefixes(self) -> tuple[int, ...]:
        """Tokens of all ancestors of each segment: the position of its first token."""
        before: list[int] = []
        for parent in self.parents:
            before.append(before[parent] + self.lengths[parent] if parent >= 0 else 0)
        return tuple(before)

    @cached_property
    def longest_context(self) -> int:
        """The most keys a query sees: what a sliding window has to reach to be no window."""
        return max(n + before for n, before in zip(self.lengths, self.prefixes, strict=True))

    @cached_property
    def position_ids(self) -> Tensor:
        """(1, T) int64: from 0 in every root, from where its parent ends in every other segment."""
        pairs = zip(self.lengths, self.prefixes, strict=True)
        return torch.cat([torch.arange(before, before + n) for n, before in pairs])[None].to(
            self.cu_seqlens.device
        )

    @cached_property
    def segments(self) -> Tensor:
        counts = torch.tensor(self.lengths)
        return torch.arange(len(counts)).repeat_interleave(counts).to(self.cu_seqlens.device)

    @cached_property
    def related(self) -> Tensor:
        """(S, S) bool: a segment sees itself and its ancestors (no position behind its own)."""
        seen = torch.eye(len(self.parents), dtype=torch.bool)
        for segment, parent in enumerate(self.parents):
            if parent >= 0:
                seen[segment] |= seen[parent]
        return seen.to(self.cu_seqlens.device)

    @cached_property
    def calls(self) -> tuple[Call, ...]:
        """Call 0: every segment on itself, causally. Call j: every segment with an ancestor at
        distance j on that ancestor, which without descendants there has no queries.
        """
        device, whole = self.cu_seqlens.device, slice(0, self.total)
        calls = [Call(Spans.of(self.lengths, self.lengths, device, causal=True), whole, whole)]
        run = [(s, parent) for s, parent in enumerate(self.parents) if parent >= 0]
        while run:
            first, end = run[0][1], run[-1][1] + 1
            queries = [0] * (end - first)
            for segment, ancestor in run:
                queries[ancestor - first] += self.lengths[segment]
            spans = Spans.of(queries, self.lengths[first:end], device, causal=False)
            rows = slice(self.starts[run[0][0]], self.starts[run[-1][0] + 1])
            calls.append(Call(spans, rows, slice(self.starts[first], self.starts[end])))
            run = [(s, above) for s, ancestor in run if (above := self.parents[ancestor]) >= 0]
        return tuple(calls)

    def window_calls(self, window: int) -> tuple[Call]:
        """One causal call with each segment's keys behind copies of its ancestors' last window − 1:
        a window moves with each row, a call on an ancestor does not.
        """
        return self.cached(("copies", window), lambda: self._window_calls(window))

    def _window_calls(self, window: int) -> tuple[Call]:
        keys: list[Tensor] = []
        for start, end, parent in zip(self.starts, self.starts[1:], self.parents, strict=False):
            path = keys[parent] if parent >= 0 else torch.arange(0)
            seen = path[max(0, len(path) - window + 1) :]
            keys.append(torch.cat([seen, torch.arange(start, end)]))
        device = self.cu_seqlens.device
        spans = Spans.of(self.lengths, [len(x) for x in keys], device, causal=True)
        copies = Copies(*(x.to(device) for x in Copies.of(torch.cat(keys), self.total)))
        return (Call(spans, slice(0, self.total), copies),)

    def cached(self, key: Hashable, build: Callable[[], Built]) -> Built:
        """Build what a kernel derives from the layout once, for all layers."""
        if key not in self._cache:
            self._cache[key] = build()
        return self._cache[key]

    @cached_property
    def _cache(self) -> dict[Hashable, Any]:
        return {}
