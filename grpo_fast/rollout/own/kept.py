"""The ids that a truncating sampler chose from: gathered by token, handed out by completion."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from grpo_fast.rollout.engine import Kept
from grpo_fast.rollout.sampler import Drawn


class KeptIds:
    """The kept ids of B completions of at most L tokens, on the CPU."""

    def __init__(self, rows: int, length: int) -> None:
        self.counts = torch.zeros(rows, length, dtype=torch.int64)
        self.masses = torch.zeros(rows, length)
        self.ids: list[Tensor] = []
        self.rows: list[Tensor] = []  # of each of `ids`

    def add(self, rows: Tensor, t: int, drawn: Drawn) -> None:
        """Token t of these rows. Waits for the device where something was truncated."""
        if drawn.candidates is None or drawn.kept is None or drawn.mass is None:
            return
        kept, rows = drawn.kept.cpu(), rows.cpu()
        counts = kept.sum(1)
        self.counts[rows, t], self.masses[rows, t] = counts, drawn.mass.cpu()
        self.ids.append(drawn.candidates.to("cpu", torch.int32)[kept])
        self.rows.append(rows.repeat_interleave(counts))

    def by_completion(self, lengths: Sequence[int]) -> list[Kept | None]:
        if not self.ids:
            return [None] * len(lengths)
        order = torch.cat(self.rows).argsort(stable=True)  # stable: by time within a row
        ids = torch.cat(self.ids)[order].split(self.counts.sum(1).tolist())
        sets: list[Kept | None] = []
        for own, counts, mass, length in zip(ids, self.counts, self.masses, lengths, strict=True):
            offsets = torch.zeros(length + 1, dtype=torch.int64)
            torch.cumsum(counts[:length], 0, out=offsets[1:])
            sets.append(Kept(own[: int(offsets[-1])].clone(), offsets, mass[:length].clone()))
        return sets
