"""What a truncating sampler chose from, gathered token by token, handed out by completion."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from grpo_fast.rollout.engine import Kept


class KeptIds:
    """The kept ids of B completions, as they grow."""

    def __init__(self) -> None:
        self.rows: list[Tensor] = []
        self.ids: list[Tensor] = []
        self.counts: list[Tensor] = []  # (B,) of each token
        self.masses: list[Tensor] = []  # (B,) of each token

    def add(self, z: Tensor, kept: Tensor) -> None:  # (B, V) logits, and with -inf for those gone
        """The next token of every row."""
        is_kept = kept > float("-inf")
        rows, ids = is_kept.nonzero(as_tuple=True)
        self.rows.append(rows.int())
        self.ids.append(ids.int())
        self.counts.append(is_kept.sum(-1))
        self.masses.append((kept.logsumexp(-1) - z.logsumexp(-1)).exp())

    def by_completion(self, lengths: Sequence[int]) -> list[Kept | None]:
        """Of each row, cut to its length; None where nothing was truncated."""
        if not self.ids:
            return [None] * len(lengths)
        counts, masses = (torch.stack(x, 1).cpu() for x in (self.counts, self.masses))
        order = torch.cat(self.rows).sort(stable=True).indices  # by row, then by token
        ids = torch.cat(self.ids)[order].cpu().split(counts.sum(1).tolist())
        found: list[Kept | None] = []
        for own, of_row, mass, n in zip(ids, counts, masses, lengths, strict=True):
            offsets = torch.nn.functional.pad(of_row[:n].cumsum(0), (1, 0))
            found.append(Kept(own[: int(offsets[-1])].clone(), offsets, mass[:n].clone()))
        return found
