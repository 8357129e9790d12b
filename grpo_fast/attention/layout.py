"""Where each sequence stands in a packed row: computed once per micro-batch on the host, read by every layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

# Segments at least this long relative to the longest of their bucket share one padded attention call. Padding costs
# attention work only (quadratic, small next to the MLPs); a call per segment costs Python and OpenMP start-up.
BUCKET_FILL = 0.75


class Bucket(NamedTuple):
    """Segments of similar length, as one padded block: `rows` gathers it, `slots` reads its real rows back."""

    rows: Tensor  # (S*L,) int64: packed row of each slot; a padding slot repeats the segment's last row
    slots: Tensor  # (real rows,) int64: slot of each real row, in packed order of the bucket's segments
    packed: Tensor  # (real rows,) int64: packed row of each of `slots`
    segments: int
    length: int


@dataclass(frozen=True)
class PackedLayout:
    """Segments of one packed row of T tokens. Travels to the attention function as `model(..., packed_layout=...)`."""

    cu_seqlens: Tensor  # (S+1,) int32, contiguous, on the model's device
    lengths: tuple[int, ...]  # the same on the host: no layer has to wait for the device

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device | str = "cpu") -> PackedLayout:
        """The layout of segments of these lengths, one after the other.

        Raises ValueError for an empty segment: FlashAttention gives it lse = +inf.
        """
        if not lengths or min(lengths) < 1:
            raise ValueError(f"lengths: expected at least one segment and none empty, came {list(lengths)[:8]}")
        ends = [0, *accumulate(lengths)]
        return cls(torch.tensor(ends, dtype=torch.int32, device=device), tuple(lengths))

    @property
    def total(self) -> int:
        """T, the tokens of the packed row."""
        return sum(self.lengths)

    @property
    def max_seqlen(self) -> int:
        return max(self.lengths)

    @cached_property
    def position_ids(self) -> Tensor:
        """(1, T) int64, from 0 in every segment."""
        positions = torch.cat([torch.arange(n) for n in self.lengths])
        return positions[None].to(self.cu_seqlens.device)

    @cached_property
    def buckets(self) -> list[Bucket]:
        """Segments grouped by similar length, longest first (for the padded path, which CPUs take)."""
        starts = [0, *accumulate(self.lengths)]
        groups: list[list[int]] = []
        for segment in sorted(range(len(self.lengths)), key=lambda s: -self.lengths[s]):
            if not groups or self.lengths[segment] < BUCKET_FILL * self.lengths[groups[-1][0]]:
                groups.append([])
            groups[-1].append(segment)
        return [self._bucket(sorted(group), starts) for group in groups]

    def _bucket(self, segments: list[int], starts: list[int]) -> Bucket:
        longest = max(self.lengths[s] for s in segments)
        first = torch.tensor([starts[s] for s in segments])[:, None]
        length = torch.tensor([self.lengths[s] for s in segments])[:, None]
        offset = torch.arange(longest)[None]
        real = (offset < length).reshape(-1)
        rows = (first + torch.minimum(offset, length - 1)).reshape(-1)
        slots = real.nonzero()[:, 0]
        device = self.cu_seqlens.device
        return Bucket(rows.to(device), slots.to(device), rows[slots].to(device), len(segments), longest)

    @cached_property
    def from_buckets(self) -> Tensor:
        """(T,) int64: where each packed row stands when the buckets' real rows are laid one after the other."""
        return torch.cat([b.packed for b in self.buckets]).argsort()
