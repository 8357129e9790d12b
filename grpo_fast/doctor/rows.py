"""Log-probabilities of drawn tokens by the definition: explicit logits, edited, scaled, cut."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from grpo_fast.attention import Head
from grpo_fast.doctor.view import KEPT, Truncation, View
from grpo_fast.rollout import Kept

ROWS = 64  # logits that are there at a time
REPETITION, PRESENCE, FREQUENCY = "repetition_penalty", "presence_penalty", "frequency_penalty"
BIAS, NO_EOS, SOFTCAP = "logit_bias", "min_tokens", "softcap"


class Drawn(NamedTuple):
    """R drawn tokens, those of one completion side by side, and what they were drawn behind."""

    targets: Tensor  # (R,) int64
    place: Tensor  # (R,) int64: of the token in its completion, from 0
    prompts: Sequence[Sequence[int]]  # of each row
    eos_ids: Sequence[int]
    kept: Kept | None = None  # what each was drawn from; None: not known


class Rows(NamedTuple):
    """Some of the drawn tokens, with their logits before any softcap."""

    rows: slice
    z: Tensor  # (r, V) fp32
    drawn: Drawn
    softcap: float | None

    @property
    def targets(self) -> Tensor:  # (r, 1)
        return self.drawn.targets[self.rows, None]

    def scaled(self, view: View) -> Tensor:  # (r, V)
        """The logits that a view draws from: softcap, edit and temperature applied."""
        kind, value = view.edit or ("", None)
        cap = value if kind == SOFTCAP else self.softcap
        z = self.z if cap is None else cap * torch.tanh(self.z / cap)
        if kind in (REPETITION, PRESENCE, FREQUENCY):
            counts = self._counts()
            seen = counts > 0
            if kind == REPETITION:
                seen |= self._prompted()
                z = torch.where(seen, torch.where(z > 0, z / value, z * value), z)
            else:
                z = z - value * (counts if kind == FREQUENCY else seen)
        elif kind in (BIAS, NO_EOS):
            z = z.clone()
            if kind == BIAS:
                z[:, value[0]] += value[1]
            else:
                early = (self.drawn.place[self.rows, None] < value).nonzero()[:, :1]
                z[early, torch.tensor(self.drawn.eos_ids, device=z.device)] = -torch.inf
        return z / view.temperature

    def logps(self, view: View) -> Tensor:  # (r,)
        """log p(targets) under the fields of a view that concern logits."""
        x, drawn = self.scaled(view), self.targets
        logps = x.log_softmax(-1).gather(-1, drawn)[:, 0]
        if isinstance(view.truncation, Truncation):
            return logps - log_kept_mass(x, drawn, view.truncation)
        if view.truncation == KEPT:
            inside = x.masked_fill(~self._mask(), -torch.inf).logsumexp(-1)
            return x.gather(-1, drawn)[:, 0] - inside
        return logps

    def _counts(self) -> Tensor:
        """(r, V): how often each token stands in the completion before a row."""
        counts, targets = torch.zeros_like(self.z), self.drawn.targets
        for row, place in enumerate(self.drawn.place[self.rows].tolist()):
            end = self.rows.start + row
            before = targets[end - place : end]
            counts[row].index_add_(0, before, torch.ones_like(before, dtype=counts.dtype))
        return counts

    def _prompted(self) -> Tensor:
        """(r, V) bool: whether a token stands in a row's prompt."""
        seen = torch.zeros_like(self.z, dtype=torch.bool)
        for row, prompt in enumerate(self.drawn.prompts[self.rows]):
            seen[row, torch.tensor(prompt)] = True
        return seen

    def _mask(self) -> Tensor:
        """(r, V) bool: what rows were drawn from; an empty row is the whole vocabulary."""
        kept = self.drawn.kept
        assert kept is not None
        mask = torch.zeros(self.z.shape, dtype=torch.bool)
        for row in range(len(self.z)):
            start, end = kept.offsets[self.rows.start + row :][:2].tolist()
            mask[row, kept.ids[start:end].long() if end > start else slice(None)] = True
        return mask.to(self.z.device)


def rows_of(
    hidden: Tensor,  # (R, H)
    head: Head,
    drawn: Drawn,
    dtype: torch.dtype | None = None,  # of the product; None: fp32
) -> Iterator[Rows]:
    """The logits of all rows, ROWS at a time."""
    wide = dtype or torch.float32
    weight = head.weight.to(wide)
    bias = None if head.bias is None else head.bias.to(wide)
    for first in range(0, len(hidden), ROWS):
        rows = slice(first, first + ROWS)
        z = head.logit_scale * F.linear(hidden[rows].to(wide), weight, bias).float()
        yield Rows(rows, z, drawn, head.softcap)


def log_kept_mass(
    x: Tensor,  # (r, V) logits
    drawn: Tensor,  # (r, 1) int64
    truncation: Truncation,
) -> Tensor:  # (r,)
    """The logarithm of the probability that min-p, top-k, then top-p leave."""
    ordered = x.sort(-1, descending=True).values
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
