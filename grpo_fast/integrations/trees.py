"""What a loss over a tree needs, whoever recorded its samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from grpo_fast import Support
from grpo_fast.attention import PackedTree


class TreeBatch(NamedTuple):
    """B samples in one row, with R trained tokens."""

    pack: PackedTree
    advantages: Tensor  # (B,) or (R,) fp32
    old_logps: Tensor  # (R,) fp32, of the sampler
    support: Support | None = None  # what each token was drawn from

    @property
    def loss_inputs(self) -> dict[str, Any]:
        """The keywords of `linear_grpo_loss` beside hidden states, head and configuration."""
        return {
            "target_ids": self.pack.target_ids, "hidden_rows": self.pack.predicting,
            "cu_seqlens": self.pack.cu_seqlens, "advantages": self.advantages,
            "old_logps": self.old_logps, "support": self.support,
        }  # fmt: skip


def joined_support(
    kept: Sequence[tuple[Tensor, Tensor] | None], pack: PackedTree, device: torch.device | str
) -> Support | None:
    """The sets (ids, counts) that each sample's trained tokens were drawn from, one after another.

    A sample without any drew from the whole vocabulary, which an empty set stands for. None: no
    sample has any.
    """
    if all(sets is None for sets in kept):
        return None
    sizes = zip(kept, pack.lengths, strict=True)
    counts = [torch.zeros(n, dtype=torch.int64) if s is None else s[1] for s, n in sizes]
    ids = torch.cat([sets[0] for sets in kept if sets is not None])
    offsets = torch.nn.functional.pad(torch.cat(counts).cumsum(0), (1, 0))
    return Support(ids.to(device), offsets.to(device))
