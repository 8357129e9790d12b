"""A view: one way in which a completion's log-probabilities may have come about.

The trainer has one view, an engine that is set up well the same; each field that differs is a cause
of the difference between them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from grpo_fast.doctor.prompts import AS_SENT, UNPADDED
from grpo_fast.doctor.rows import Truncation

FITTED = None  # a temperature: the one at which the difference is smallest
KEPT = "kept"  # a truncation: to the tokens that the engine says it chose from
CURRENT, PREVIOUS, BF16 = "current", "previous", "bfloat16"
PACKED, OWN = "packed", "own"


class View(NamedTuple):
    """How log-probabilities are computed."""

    temperature: float | None
    truncation: Truncation | str | None = None  # None: over the whole vocabulary
    head: torch.dtype | None = None  # of the product that gives the logits; None: fp32
    reading: str = AS_SENT  # of the prompt
    padding: str = UNPADDED  # of the prompts, without a mask
    model: str = CURRENT
    forward: str = PACKED  # the trainer's forward pass, or the model's own

    def differences(self, other: View) -> dict[str, View]:
        """Field → this view with that field alone changed to what `other` has."""
        return {
            name: self._replace(**{name: value})
            for name, value in other._asdict().items()
            if value != getattr(self, name)
        }

    def is_trainers(self) -> bool:
        """Whether the trainer's own code computes it: packed rows, the fused head."""
        plain = View(self.temperature, self.truncation, model=self.model)
        return self == plain and self.model != BF16 and self.truncation in (None, KEPT)
