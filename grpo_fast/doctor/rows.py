"""Log-probabilities of drawn tokens by the definition: explicit logits, temperature, truncation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from grpo_fast.attention import Head
from grpo_fast.rollout import Kept

ROWS = 64  # logits that are there at a time


class Truncation(NamedTuple):
    """Which tokens a sampler chose from: top-k (0: off), then top-p (1: off) over those."""

    top_k: int
    top_p: float

    @property
    def is_on(self) -> bool:
        return self.top_k > 0 or self.top_p < 1


@torch.no_grad()
def row_logps(
    hidden: Tensor,  # (R, H)
    head: Head,
    targets: Tensor,  # (R,)
    temperatures: Sequence[float],
    *,
    truncation: Truncation | None = None,
    kept: Kept | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:  # (len(temperatures), R) fp32 on the CPU
    """log p(targets) at each temperature.

    Args:
        truncation: renormalised over what it leaves; the target, which was drawn, is among that.
        kept: renormalised over these tokens instead, row by row.
        dtype: the product's; None: fp32 of whatever is given.
    """
    wide = dtype or torch.float32
    weight = head.weight.to(wide)
    bias = None if head.bias is None else head.bias.to(wide)
    found = torch.zeros(len(temperatures), len(targets))
    for first in range(0, len(targets), ROWS):
        rows = slice(first, first + ROWS)
        z = head.logit_scale * F.linear(hidden[rows].to(wide), weight, bias).float()
        if head.softcap is not None:
            z = head.softcap * torch.tanh(z / head.softcap)
        drawn = targets[rows, None]
        mask = None if kept is None else _mask(kept, first, z)
        for i, temperature in enumerate(temperatures):
            x = z / temperature
            logps = x.log_softmax(-1).gather(-1, drawn)[:, 0]
            if truncation is not None:
                logps = logps - log_kept_mass(x, drawn, truncation)
            elif mask is not None:
                inside = x.masked_fill(~mask, -torch.inf).logsumexp(-1)
                logps = x.gather(-1, drawn)[:, 0] - inside
            found[i, rows] = logps.cpu()
    return found


def log_kept_mass(
    x: Tensor,  # (r, V) logits
    drawn: Tensor,  # (r, 1) int64
    truncation: Truncation,
) -> Tensor:  # (r,)
    """The logarithm of the probability that top-k, then top-p leave."""
    ordered = x.sort(-1, descending=True).values
    p = ordered.softmax(-1)
    mass = p.cumsum(-1)
    most = min(truncation.top_k or x.shape[-1], x.shape[-1])
    # A token stays while the mass before it, of what top-k has left, is below top_p.
    stays = (mass - p)[:, :most] < truncation.top_p * mass[:, most - 1 : most]
    last = stays.sum(-1, keepdim=True).clamp(min=1) - 1
    least = x.gather(-1, drawn) < ordered.gather(-1, last)  # drawn all the same
    own = x.softmax(-1).gather(-1, drawn)
    return (mass.gather(-1, last) + torch.where(least, own, 0.0)).log()[:, 0]


def _mask(kept: Kept, first: int, z: Tensor) -> Tensor:
    """(r, V) bool: what rows `first` … were drawn from; an empty row is the whole vocabulary."""
    mask = torch.zeros(z.shape, dtype=torch.bool)
    for row in range(len(z)):
        start, end = kept.offsets[first + row : first + row + 2].tolist()
        mask[row, kept.ids[start:end].long() if end > start else slice(None)] = True
    return mask.to(z.device)
