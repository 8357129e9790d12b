"""The optimizer updates that one batch of completions was good for."""

from __future__ import annotations

from collections.abc import Sequence

from grpo_fast.train.metrics.losses import LossMetrics, finite


class Updates:
    """What each update's losses returned, the norm of its gradient, and the rate it was made with.

    Args:
        per_pass: optimizer updates of one pass over the batch.
        first: the number of the first update, from 1, in the whole run.
    """

    def __init__(self, per_pass: int, first: int) -> None:
        self.per_pass, self.first = per_pass, first
        self.losses: list[LossMetrics] = []
        self.norms: list[float] = []
        self.rates: list[float] = []

    def add(self, losses: LossMetrics, rate: float, norm: float) -> None:
        self.losses.append(losses)
        self.rates.append(rate)
        self.norms.append(norm)

    def __len__(self) -> int:
        return len(self.losses)

    @property
    def passes(self) -> float:
        return len(self) / self.per_pass

    def merged(self, losses: Sequence[LossMetrics] | None = None) -> LossMetrics:
        """Of all updates, or of some; the logps are those of the first pass."""
        seen = LossMetrics()
        for index, found in enumerate(self.losses if losses is None else losses):
            seen.extend(found, with_logps=index < self.per_pass)
        return seen

    def last_pass(self, name: str) -> float:
        """The mean of a metric over the tokens of the whole latest pass (one sync)."""
        return self.merged(self.losses[-self.per_pass :]).mean(name)

    def rows(self) -> list[dict[str, float]]:
        """A row of metrics for each update: its loss's, `grad_norm`, `learning_rate`, `update`."""
        return [
            finite({"update": float(self.first + index), **found.result(), "grad_norm": norm,
                    "learning_rate": rate})
            for index, (found, norm, rate) in enumerate(
                zip(self.losses, self.norms, self.rates, strict=True)
            )
        ]  # fmt: skip
