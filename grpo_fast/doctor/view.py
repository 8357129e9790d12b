"""A view: one way in which log-probabilities may have come about."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from grpo_fast import Support, logits_logps
from grpo_fast.doctor.prompts import AS_SENT

ROWS = 64  # logits that are there at a time
KEPT = "the tokens that it names"  # a truncation: to those that the engine says it chose from
EMBEDDING = "the embedding's weight"  # a head
CURRENT, OWN = "current", "own"  # models: the trainer's packed rows; the model's own attention


class Edit(StrEnum):
    REPETITION, PRESENCE = "repetition_penalty", "presence_penalty"
    FREQUENCY, BIAS, NO_EOS, SOFTCAP = "frequency_penalty", "logit_bias", "min_tokens", "softcap"


class Truncation(NamedTuple):
    """Which tokens a sampler chose from: min-p, top-k (0: off), then top-p over those."""

    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def __str__(self) -> str:
        return " ".join(f"{name}={value:.4g}" for name, value in self._asdict().items())


class View(NamedTuple):
    temperature: float
    truncation: Truncation | str | None = None  # None: over the whole vocabulary
    edit: tuple[Edit, Any] | None = None  # of the logits, before the temperature: (kind, value)
    shift: int = 0  # the log-probability told for place t is that of place t + shift
    head: torch.dtype | str | None = None  # None: the trainer's in fp32; a dtype, or EMBEDDING
    reading: str = AS_SENT  # of the prompts
    model: str = CURRENT  # a name in `models.variants`


class Drawn(NamedTuple):
    """R drawn tokens, those of a completion side by side, with their prompts."""

    targets: Tensor  # (R,) int64
    place: Tensor  # (R,) int64: of the token in its completion, from 0
    prompts: Sequence[Sequence[int]]  # of each row
    eos_ids: Sequence[int]
    kept: Support | None = None  # what each was drawn from; None: not known


@dataclass
class Rows:
    """Rows `first` … of the drawn tokens, with their logits before any softcap."""

    z: Tensor  # (r, V) fp32
    first: int
    drawn: Drawn
    softcap: float | None
    _sorted: dict[View, Tensor] = field(default_factory=dict)

    @property
    def targets(self) -> Tensor:  # (r, 1)
        return self.drawn.targets[self.first : self.first + len(self.z), None]

    def scaled(self, view: View) -> Tensor:  # (r, V)
        """The logits that a view draws from: softcap, edit and temperature applied."""
        kind, value = view.edit or ("", None)
        cap = value if kind == Edit.SOFTCAP else self.softcap
        # A copy: other views of these rows start from `self.z`, and z is edited in place.
        z = self.z.clone() if cap is None else cap * torch.tanh(self.z / cap)
        if kind in (Edit.REPETITION, Edit.PRESENCE, Edit.FREQUENCY):
            counts, prompted = self._seen
            seen = counts > 0
            if kind == Edit.REPETITION:
                z = torch.where(seen | prompted, torch.where(z > 0, z / value, z * value), z)
            else:
                z -= value * (counts if kind == Edit.FREQUENCY else seen)
        elif kind == Edit.BIAS:
            z[:, value[0]] += value[1]
        elif kind == Edit.NO_EOS:
            early = self.drawn.place[self.first : self.first + len(z)] < value
            z[early.nonzero(), torch.tensor(self.drawn.eos_ids, device=z.device)] = -torch.inf
        return z / view.temperature

    def logps(self, view: View) -> Tensor:  # (r,) fp32
        x, drawn = self.scaled(view), self.targets
        logps = x.log_softmax(-1).gather(-1, drawn)[:, 0]
        if isinstance(view.truncation, Truncation):
            plain = view._replace(truncation=None)
            if plain not in self._sorted:
                self._sorted = {plain: x.sort(-1, descending=True).values}
            return logps - log_kept_mass(x, self._sorted[plain], drawn, view.truncation)
        if view.truncation == KEPT:
            ids, offsets = self.drawn.kept or ()
            offsets = offsets[self.first : self.first + len(x) + 1]
            kept = Support(ids[offsets[0] : offsets[-1]], offsets - offsets[0])
            return logits_logps(x, drawn[:, 0], support=kept)
        return logps

    @cached_property
    def _seen(self) -> tuple[Tensor, Tensor]:
        """(r, V) each: how often a token stands in the completion so far; whether in the prompt."""
        counts, prompted = torch.zeros_like(self.z), torch.zeros_like(self.z, dtype=torch.bool)
        for row in range(len(self.z)):
            end = self.first + row
            before = self.drawn.targets[end - int(self.drawn.place[end]) : end]
            counts[row].index_add_(0, before, torch.ones_like(before, dtype=counts.dtype))
            prompted[row, torch.tensor(self.drawn.prompts[end])] = True
        return counts, prompted


def log_kept_mass(
    x: Tensor,  # (r, V) logits
    ordered: Tensor,  # (r, V) the same, falling
    drawn: Tensor,  # (r, 1) int64
    truncation: Truncation,
) -> Tensor:  # (r,)
    """The logarithm of the probability that min-p, top-k, then top-p leave."""
    p = ordered.softmax(-1)
    mass = p.cumsum(-1)
    most = min(truncation.top_k or x.shape[-1], x.shape[-1])
    # A token stays while the mass before it, of what top-k has left, is below top_p.
    stays = (mass - p)[:, :most] < truncation.top_p * mass[:, most - 1 : most]
    stays &= p[:, :most] >= truncation.min_p * p[:, :1]
    last = stays.sum(-1, keepdim=True).clamp(min=1) - 1
    least = x.gather(-1, drawn) < ordered.gather(-1, last)  # drawn all the same
    own = x.softmax(-1).gather(-1, drawn)
    return (mass.gather(-1, last) + torch.where(least, own, 0.0)).log()[:, 0]
