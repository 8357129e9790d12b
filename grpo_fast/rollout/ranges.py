"""Selection of segments of flat tensors. Offsets mark where each segment starts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from grpo_fast.kernels.support import Support


def ranges(offsets: Tensor, chosen: Tensor) -> Tensor:
    """Return the integers from offsets[i] to offsets[i + 1] - 1 for each chosen i, concatenated.

    Args:
        offsets: (n + 1,) int64, not decreasing.
        chosen: (k,) int64 indices i in [0, n).

    Returns:
        The integers, (total,) int64.
    """
    counts = offsets.diff()[chosen]
    before = counts.cumsum(0) - counts
    starts = offsets[:-1][chosen] - before
    total = int(counts.sum())
    return torch.arange(total) + starts.repeat_interleave(counts, output_size=total)


def select_support(support: Support | None, rows: Tensor) -> Support | None:
    """Select the support of some completion tokens.

    Args:
        support: the support of R tokens, or None.
        rows: (r,) int64, indices of the tokens to select.

    Returns:
        The support of the r tokens. None if all r tokens were sampled from the full vocabulary.
    """
    if support is None:
        return None
    ids = support.ids[ranges(support.offsets, rows)]
    return Support(ids, pad(support.offsets.diff()[rows].cumsum(0), (1, 0))) if len(ids) else None


def join_supports(
    supports: Sequence[Support | None], masses: Sequence[Tensor | None], counts: Sequence[int]
) -> tuple[Support | None, Tensor | None]:
    """Concatenate the supports of consecutive pieces of a table, with their probability masses.

    Args:
        supports: the support of each piece, or None for the full vocabulary.
        masses: (count,) fp32 masses of each piece, or None if they were not reported.
        counts: number of completion tokens in each piece.

    Returns:
        The joined support and the masses (R,), where unreported masses are NaN. Both are None if no
        piece has a support.
    """
    sets = [support and (support.ids, support.offsets.diff()) for support in supports]
    support = Support.join(sets, counts, "cpu")
    if support is None:
        return None, None
    unknown = [torch.full((count,), torch.nan) for count in counts]
    known = zip(masses, unknown, strict=True)
    return support, torch.cat([nan if mass is None else mass for mass, nan in known])
