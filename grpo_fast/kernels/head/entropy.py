"""Passes that compute log-probabilities over token sets, but entropies over the full vocabulary."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from grpo_fast.kernels.types import RowLoss, RowStats, Wanted
from grpo_fast.objective.coefficients import RowTerms
from grpo_fast.objective.config import LossConfig


@dataclass(eq=False)
class FullEntropySweep:
    """Two passes over the same rows: one computes logps, and the other computes entropies.

    Args:
        supported: the pass that computes logps over the token sets. It must not overwrite logits of
            the caller.
        full: the pass that computes entropies over the full vocabulary. It may overwrite logits of
            the caller.
    """

    supported: Any
    full: Any
    # Statistics over the full vocabulary, for the backward pass. No logits are cached.
    cached: RowStats | None = field(default=None, init=False)
    has_entropy_gradient = True
    filtered = None

    def __post_init__(self) -> None:
        self.num_rows: int = self.supported.num_rows

    def logps(self, *, return_entropy: bool, keep: bool = False) -> RowStats:
        """Compute (lse, logps, entropy) of the active rows, (T,) fp32. `keep` is ignored."""
        lse, logps, _ = self.supported.logps(return_entropy=False)
        self.cached = self.full.logps(return_entropy=True)
        return lse, logps, self.cached[2]

    def loss_gradients(
        self, terms: RowTerms, config: LossConfig, wanted: Wanted
    ) -> tuple[RowLoss, tuple[Tensor, ...]]:
        """Compute the policy loss, and the gradients of the logp pass and the entropy pass."""
        stats = self.logps(return_entropy=True)
        losses, g = self.supported.kernels.row_coefficients(stats[1], terms, config)
        return RowLoss(*stats, losses, g), self.gradients(g, terms.grad_entropy, stats, wanted)

    def gradients(
        self, g: Tensor, g_entropy: Tensor | None, known: RowStats, wanted: Wanted
    ) -> tuple[Tensor, ...]:
        """Compute the gradients of Σ g·logp and Σ g_entropy·entropy, in two separate passes."""
        gradients: tuple[Tensor, ...] = self.supported.gradients(
            g, None, (*known[:2], None), wanted
        )
        if g_entropy is None or not any(wanted):
            return gradients
        if self.cached is None:  # the forward pass ran in a different object
            self.cached = self.full.logps(return_entropy=True)
        more: tuple[Tensor, ...] = self.full.gradients(
            torch.zeros_like(g), g_entropy, self.cached, wanted
        )
        # Add the gradients of both passes. If a gradient was not requested, it is empty in both
        # passes.
        return tuple(x.add_(y) if x.numel() else x for x, y in zip(more, gradients, strict=True))
