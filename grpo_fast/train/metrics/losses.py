"""Reduction of the metrics of the loss over micro-batches, optimizer steps and ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from grpo_fast.train.ranks import distributed

# Metrics of which each micro-batch reports its part of the value of an optimizer step. The parts
# are summed within an optimizer step, and the sums are averaged over the optimizer steps.
PARTS = ("loss", "policy_loss", "value/loss")
SUMS = ("active_tokens", "skipped_rows", "kl_guarded")  # metrics that are summed over micro-batches


@dataclass
class LossMetrics:
    """Metrics of all micro-batches of a step. `result` reduces them with only one GPU sync."""

    parts: list[tuple[dict[str, Tensor], int]] = field(default_factory=list)  # metrics, tokens
    # For each micro-batch, the log-probs of its active tokens from the trainer and from the
    # sampler. Both tensors have the shape (active tokens,).
    logps: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    optimizer_steps: int = 1

    def add(self, metrics: Mapping[str, Tensor], tokens: int) -> None:
        """Add the metrics of a micro-batch, weighted by its number of tokens."""
        part = {name: value.detach().float() for name, value in metrics.items()}
        self.parts.append((part, tokens))

    def of_all_ranks(self) -> LossMetrics:
        """Gather the metrics of the micro-batches of all ranks. All ranks must call this."""
        if distributed.size() == 1:
            return self
        every = LossMetrics(optimizer_steps=self.optimizer_steps)
        parts = []
        for part, tokens in self.parts:
            values = torch.stack(list(part.values())).cpu()  # copies all values with one GPU sync
            parts.append((dict(zip(part, values, strict=True)), tokens))
        logps = [(own.cpu(), theirs.cpu()) for own, theirs in self.logps]
        for of_rank in distributed.gather((parts, logps)):
            every.parts += of_rank[0]
            every.logps += of_rank[1]
        return every

    def result(self) -> dict[str, float]:
        """Reduce all metrics over all micro-batches."""
        names = list(self.parts[0][0])
        merged = [self._merge(n, torch.stack([part[n] for part, _ in self.parts])) for n in names]
        return dict(zip(names, torch.stack(merged).tolist(), strict=True))

    def _merge(self, name: str, values: Tensor) -> Tensor:
        if name in PARTS:
            return values.sum() / self.optimizer_steps
        if name in SUMS:
            return values.sum()
        if name.endswith(("min", "max")):
            # Exclude micro-batches without tokens. They report 0, which could be mistaken for the
            # minimum or maximum.
            filled = [v for v, (_, tokens) in zip(values, self.parts, strict=True) if tokens]
            values = torch.stack(filled) if filled else values
            return values.min() if name.endswith("min") else values.max()
        # All other metrics are means over tokens.
        weights = torch.tensor([float(tokens) for _, tokens in self.parts], device=values.device)
        return (values * weights).sum() / weights.sum().clamp(min=1)


def finite(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics that are not NaN."""
    return {name: value for name, value in metrics.items() if not math.isnan(value)}
