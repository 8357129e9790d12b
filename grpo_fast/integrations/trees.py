"""Samples packed as a tree, as keywords of the loss."""

from __future__ import annotations

from typing import Any, NamedTuple

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
        return {
            "target_ids": self.pack.target_ids, "hidden_rows": self.pack.predicting,
            "cu_seqlens": self.pack.cu_seqlens, "advantages": self.advantages,
            "old_logps": self.old_logps, "support": self.support,
        }  # fmt: skip
