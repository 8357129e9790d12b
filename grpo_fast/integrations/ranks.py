"""The metrics of a step whose completions lie on several ranks."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

COUNTS = ("active_tokens", "skipped_rows", "kl_guarded")
# The loss of a rank is divided by the world's totals, and a gradient is the world's.
MEANS = ("loss", "policy_loss", "grad_norm")


def joined(metrics: dict[str, Tensor], gather: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """The metrics of all ranks' rows, from those that each rank has of its own; 0-d each.

    Counts are summed, extremes are those of the ranks that have a token, and a mean is one over the
    tokens of all ranks.

    Args:
        metrics: those of a `LossOutput`, in which `active_tokens` is, under the same names on every
            rank; loss and grad_norm may stand beside them.
        gather: (M,) of each rank → (ranks, M).
    """
    found = gather(torch.stack([value.float() for value in metrics.values()]))
    by_rank = dict(zip(metrics, found.T, strict=True))
    tokens = by_rank["active_tokens"]
    return {name: _join(name, values, tokens) for name, values in by_rank.items()}


def _join(
    name: str,
    values: Tensor,  # (ranks,)
    tokens: Tensor,  # (ranks,)
) -> Tensor:
    if name in COUNTS:
        return values.sum()
    if name in MEANS:
        return values.mean()
    nothing = tokens == 0
    if name.endswith("min"):
        return values.masked_fill(nothing & ~nothing.all(), torch.inf).amin()
    if name.endswith("max"):
        return values.masked_fill(nothing & ~nothing.all(), -torch.inf).amax()
    return (values * tokens).sum() / tokens.sum().clamp(min=1)
