"""A view: one way in which a completion's log-probabilities may have come about. The trainer has
one, an engine that is set up well the same; a field that differs is a cause of the difference.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from grpo_fast.doctor.prompts import AS_SENT

KEPT = "kept"  # a truncation: to the tokens that the engine says it chose from
EMBEDDING = "embedding"  # a head: the embedding's weight
CURRENT, OWN = "current", "own"  # models: the trainer's packed rows; the model's own attention


class Truncation(NamedTuple):
    """Which tokens a sampler chose from: min-p, top-k (0: off), then top-p over those."""

    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


class View(NamedTuple):
    """How log-probabilities are computed."""

    temperature: float
    truncation: Truncation | str | None = None  # None: over the whole vocabulary
    edit: tuple[str, Any] | None = None  # of the logits, before the temperature: (kind, value)
    shift: int = 0  # the log-probability told for place t is that of place t + shift
    head: torch.dtype | str | None = None  # None: the trainer's in fp32; a dtype, or EMBEDDING
    reading: str = AS_SENT  # of the prompts
    model: str = CURRENT  # a name in `models.variants`

    def differences(self, other: View) -> set[str]:
        """The fields in which two views differ."""
        return {x for x in self._fields if getattr(self, x) != getattr(other, x)}
