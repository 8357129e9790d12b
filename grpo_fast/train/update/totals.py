"""What the losses of an optimizer step are divided by."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple


class Totals(NamedTuple):
    """The normalisers of an optimizer step, on all ranks together."""

    items: int  # tokens that count
    completions: int
    micro_batches: int
    trunk_tokens: int

    @classmethod
    def of(cls, minibatch: Sequence[Any]) -> Totals:
        """The totals of one rank's micro-batches."""
        items = max(1, sum(batch.active_tokens for batch in minibatch))
        completions = sum(len(batch) for batch in minibatch)
        trunk = sum(batch.trunk_tokens for batch in minibatch)
        return cls(items, completions, len(minibatch), trunk)
