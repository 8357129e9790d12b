"""Layout of a packed row, which describes the sequences in the row.

It is computed once per micro-batch on the host, and used by every layer.

A row of T tokens consists of S segments. Each segment attends causally to itself and to all its
ancestors, and its positions continue after the positions of its parent. Segments are in level
order: first the roots, then their children, and so on. Roots without children are last. Example:

    rows:     [P1][P2]  [a1][a2][b1]  [a11][a12][b11]  [s1][s2]
    parents:   −1  −1     0   0   1     2    2    4      −1  −1

In this order, all segments that have an ancestor at distance j (1 for a parent) are next to each
other, and so are these ancestors, in the same order. One attention call can therefore process all
ancestors at one distance without copying queries or keys. A shared prompt with its completions is a
tree of two levels. If no segment has a parent, the row is a plain packed row.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.types import Device

from grpo_fast.errors import require


class AttentionParams(NamedTuple):
    """Parameters of softmax(mask(softcap(scale·q·kᵀ)), sinks).

    Attributes:
        scale: number by which the scores are multiplied.
        window: maximum number of keys that a query attends to. None: all keys.
        softcap: bound c, which turns each score s into c·tanh(s/c). None: no bound.
        sinks: (H,). Score of one more key for each head, whose value is 0. None: no such key.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None  # (H,)


def concatenated_ranges(starts: Sequence[int] | Tensor, counts: Sequence[int] | Tensor) -> Tensor:
    """Concatenate the ranges starts[i], starts[i] + 1, …, starts[i] + counts[i] − 1.

    Args:
        starts: (n,) integers, on the CPU.
        counts: (n,) integers, on the CPU. Lengths of the ranges, not negative.

    Returns:
        The integers of all ranges, (sum(counts),) int64, on the CPU.
    """
    starts, counts = (torch.as_tensor(x, dtype=torch.int64) for x in (starts, counts))
    total = int(counts.sum())
    # Range i begins at index counts[:i].sum() of the result.
    shifts = starts - (counts.cumsum(0) - counts)
    return torch.arange(total) + shifts.repeat_interleave(counts, output_size=total)


# A batch of several spans has at most this many queries, and at most this many keys. Larger batches
# are not faster, because their tensors do not fit into the caches of a CPU core.
BATCH_TOKENS = 512


class SpanBatch(NamedTuple):
    """Spans that are computed by one call. All have L queries, and all have S keys."""

    size: int  # number of spans
    queries: slice | Tensor  # rows of the queries: a slice, or (size·L,) int64 on the device
    keys: slice | Tensor  # rows of the keys: a slice, or (size·S,) int64 on the device


@dataclass(frozen=True)
class Spans:
    """N consecutive spans of queries, each with a span of keys, for one varlen attention call.

    The queries of a span attend to the keys of the same span.

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
    def batches(self) -> list[SpanBatch]:
        """Return the spans that have queries, in batches of spans with equal lengths.

        A batch of several spans has at most BATCH_TOKENS queries and BATCH_TOKENS keys.
        """
        first_query, first_key = ((0, *accumulate(x)) for x in (self.queries, self.keys))
        alike: dict[tuple[int, int], list[int]] = {}
        for span, lengths in enumerate(zip(self.queries, self.keys, strict=True)):
            if lengths[0]:
                alike.setdefault(lengths, []).append(span)
        batches = []
        for (queries, keys), spans in alike.items():
            size = max(1, BATCH_TOKENS // max(queries, keys))
            for first in range(0, len(spans), size):
                chosen = spans[first : first + size]
                query_rows = self._rows([first_query[i] for i in chosen], queries)
                key_rows = self._rows([first_key[i] for i in chosen], keys)
                batches.append(SpanBatch(len(chosen), query_rows, key_rows))
        return batches

    def _rows(self, starts: Sequence[int], length: int) -> slice | Tensor:
        """Return the rows of spans of equal length, which begin at `starts`, in ascending order.

        The result is a slice if the spans are adjacent, and otherwise int64 on the device.
        """
        if starts[-1] - starts[0] == (len(starts) - 1) * length:
            return slice(starts[0], starts[-1] + length)
        return concatenated_ranges(starts, [length] * len(starts)).to(self.cu_q.device)


Built = TypeVar("Built")


class Copies(NamedTuple):
    """Key rows of an attention call that uses some rows more than once.

    Each use of a row is called a copy of the row.
    """

    rows: Tensor  # (Tk,) int64: the row that each copy comes from
    order: Tensor  # (Tk,) int64: sorts the copies by their row
    copies: Tensor  # (T,) int64: number of copies of each row

    @classmethod
    def of(cls, rows: Tensor, total: int) -> Copies:
        # Use a stable sort, so that `sum_copies` adds the gradients of a row's copies in a fixed
        # order. The result is then bitwise reproducible.
        return cls(rows, rows.argsort(stable=True), rows.bincount(minlength=total))

    def sum_copies(self, grad: Tensor) -> Tensor:
        """Sum the gradients of all copies of a row, (Tk, …) → (T, …).

        The sum is computed in fp32 or fp64 and in a fixed order.
        """
        ordered = grad[self.order].to(torch.promote_types(grad.dtype, torch.float32))
        summed = torch.segment_reduce(ordered, "sum", lengths=self.copies, initial=0, unsafe=True)
        return summed.to(grad.dtype)


class Call(NamedTuple):
    """One varlen attention call, which uses some of the queries and keys of a packed row."""

    spans: Spans
    queries: slice  # rows of the queries
    keys: slice | Copies  # rows of the keys

    def take(self, x: Tensor) -> Tensor:
        """Return the rows of x that the call uses, (Tk, …). Here x contains the keys or the values.

        The result is a view of x, unless the call uses a row more than once.
        """
        return x[self.keys] if isinstance(self.keys, slice) else x[self.keys.rows]


@dataclass(frozen=True)
class TreeLayout:
    """Segments of one packed row of T tokens.

    Pass the layout to a model as `model(..., packed_layout=...)`.

    Attributes:
        cu_seqlens: (S+1,), int32, contiguous, on the model's device. Offsets of the segments.
        lengths: number of tokens of each segment, on the host, so that no layer waits for the
            device.
        parents: index of the parent of each segment; −1 for a root.
    """

    cu_seqlens: Tensor  # (S+1,) int32, contiguous, on the model's device
    lengths: tuple[int, ...]  # on the host
    parents: tuple[int, ...]  # −1 for a root

    @classmethod
    def of(
        cls,
        lengths: Sequence[int],
        device: torch.device | str = "cpu",
        *,
        parents: Sequence[int] = (),
    ) -> TreeLayout:
        """Build the layout of consecutive segments.

        Args:
            lengths: number of tokens of each segment. No length may be 0, because FlashAttention
                returns lse = +inf for an empty segment.
            device: the model's device.
            parents: index of each segment's parent, or −1 for a root, in ascending order. Only
                roots without children may follow at the end. If empty, all segments are roots.

        Returns:
            The layout.

        Raises:
            ValueError: an empty segment, a wrong number of parents, or parents that are not in
                level order.
        """
        fits = lengths and min(lengths) >= 1
        require(fits, "lengths", "at least one segment and none empty", list(lengths)[:8])
        count = len(lengths)
        parents = tuple(parents) or (-1,) * count
        require(len(parents) == count, "parents", f"one for each of {count} segments", len(parents))
        trees = max((s + 1 for s, parent in enumerate(parents) if parent != -1), default=0)
        for segment, (above, parent) in enumerate(pairwise((-1, *parents[:trees]))):
            expected = f"an earlier segment than {segment} and none before {above}, the parent of "
            expected += "the segment in front (level order)"
            require(above <= parent < segment, "parents", expected, parent)
        ends = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
        return cls(ends, tuple(lengths), parents)

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """Return the index of the first row of each segment, followed by the number of rows."""
        return (0, *accumulate(self.lengths))

    @property
    def total(self) -> int:
        return self.starts[-1]

    @cached_property
    def has_tree(self) -> bool:
        return max(self.parents) >= 0

    @cached_property
    def prefixes(self) -> tuple[int, ...]:
        """Return the number of tokens in the ancestors of each segment.

        This number is also the position of the segment's first token.
        """
        before: list[int] = []
        for parent in self.parents:
            before.append(before[parent] + self.lengths[parent] if parent >= 0 else 0)
        return tuple(before)

    @cached_property
    def paths(self) -> list[Tensor]:
        """Return the rows of each segment and its ancestors, in order, int64 on the CPU."""
        paths: list[Tensor] = []
        for start, end, parent in zip(self.starts, self.starts[1:], self.parents, strict=False):
            rows = torch.arange(start, end)
            paths.append(torch.cat([paths[parent], rows]) if parent >= 0 else rows)
        return paths

    @cached_property
    def longest_context(self) -> int:
        """Return the maximum number of keys that a query sees. A longer window has no effect."""
        return max(n + before for n, before in zip(self.lengths, self.prefixes, strict=True))

    @cached_property
    def position_ids(self) -> Tensor:
        """Return the positions of the tokens, (1, T) int64.

        In a root segment, they start at 0. In any other segment, they continue the positions of the
        segment's parent.
        """
        return concatenated_ranges(self.prefixes, self.lengths)[None].to(self.cu_seqlens.device)

    @cached_property
    def segments(self) -> Tensor:
        """Return the index of the segment that contains each token, (T,) int64."""
        counts = torch.tensor(self.lengths)
        return torch.arange(len(counts)).repeat_interleave(counts).to(self.cu_seqlens.device)

    @cached_property
    def related(self) -> Tensor:
        """Return a bool tensor (S, S). Entry (i, j) says whether segment i attends to segment j."""
        seen = torch.eye(len(self.parents), dtype=torch.bool)
        for segment, parent in enumerate(self.parents):
            if parent >= 0:
                seen[segment] |= seen[parent]
        return seen.to(self.cu_seqlens.device)

    def visible(self, window: int | None = None, rows: slice = slice(None)) -> Tensor:
        """Return a bool tensor (rows, T) that says which keys each query in `rows` attends to."""
        segment = self.segments
        position = self.position_ids[0]
        related = self.related[segment[rows, None], segment[None]]
        distance = position[rows, None] - position[None]
        return related & (distance >= 0) & (distance < (window or self.total + 1))

    @cached_property
    def calls(self) -> tuple[Call, ...]:
        """Return the attention calls of the row.

        In call 0, every segment attends causally to itself. In call j, every segment that has an
        ancestor at distance j attends to this ancestor. The keys of a call come from one contiguous
        range of segments. A segment in this range without descendants at distance j gets no
        queries.
        """
        device = self.cu_seqlens.device
        all_rows = slice(0, self.total)
        calls = [
            Call(Spans.of(self.lengths, self.lengths, device, causal=True), all_rows, all_rows)
        ]
        # Pair each segment with its parent, the ancestor at distance 1. Each iteration of the loop
        # replaces every ancestor with its parent, so that the distance grows by 1.
        run = [(s, parent) for s, parent in enumerate(self.parents) if parent >= 0]
        while run:
            first, end = run[0][1], run[-1][1] + 1
            # Count the queries of each ancestor. The segments with the same ancestor are next to
            # each other, so their queries form one span.
            queries = [0] * (end - first)
            for segment, ancestor in run:
                queries[ancestor - first] += self.lengths[segment]
            spans = Spans.of(queries, self.lengths[first:end], device, causal=False)
            rows = slice(self.starts[run[0][0]], self.starts[run[-1][0] + 1])
            calls.append(Call(spans, rows, slice(self.starts[first], self.starts[end])))
            run = [(s, above) for s, ancestor in run if (above := self.parents[ancestor]) >= 0]
        return tuple(calls)

    def window_calls(self, window: int) -> tuple[Call]:
        """Return one causal call for a sliding window.

        The window begins at a different key for each query, so a separate call on an ancestor
        cannot represent it. Instead, the keys of each segment are preceded by copies of the last
        window − 1 keys of its ancestors.
        """
        return self.cached(("copies", window), lambda: self._window_calls(window))

    def _window_calls(self, window: int) -> tuple[Call]:
        pairs = zip(self.paths, self.prefixes, strict=True)
        keys = [path[max(0, before - window + 1) :] for path, before in pairs]
        device = self.cu_seqlens.device
        spans = Spans.of(self.lengths, [len(x) for x in keys], device, causal=True)
        copies = Copies(*(x.to(device) for x in Copies.of(torch.cat(keys), self.total)))
        return (Call(spans, slice(0, self.total), copies),)

    def cached(self, key: Hashable, build: Callable[[], Built]) -> Built:
        """Return the result of `build`, which runs once per key. All layers share the result."""
        if key not in self._cache:
            self._cache[key] = build()
        return self._cache[key]

    @cached_property
    def _cache(self) -> dict[Hashable, Any]:
        return {}
