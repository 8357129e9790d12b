"""Optional approximation: skip vocabulary columns with a small share of the gradient.

In a chunk's d-logits d (C, V), column j has the mass m_j = Σ_t |d_tj|. The columns with the
smallest masses are skipped as long as the sum of their masses, δ, is at most `tolerance`·Σ_j m_j.
The errors are bounded:

    ‖ΔdH‖_F ≤ δ · max_j ‖W_j‖        ‖ΔdW‖_F ≤ δ · max_t ‖h_t‖        |Δdb|₁ ≤ δ

The loss and the log-probabilities do not change. The dH of a row depends on the chunk that contains
the row, so it is no longer bitwise independent of the batch. A run is still reproducible.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from grpo_fast.kernels.types import widened

# Skip columns only if the share of the kept columns is less than this value. Otherwise, gathering
# the kept columns costs more time than the smaller GEMMs save.
WORTH_BELOW = 0.6
# Number of rows of d-logits that are processed at a time, to limit temporary memory.
ROWS = 64


class Filtered(NamedTuple):
    """Statistics of the gradient filter for one chunk.

    The mass of a column is the sum of its |d-logits|.
    """

    dropped: Tensor  # 0-d fp64, the skipped mass
    total: Tensor  # 0-d fp64, the mass of all columns
    columns: int  # number of elements in the kept columns
    elements: int  # number of all elements


def filtered_shares(chunks: list[Filtered], device: torch.device) -> Tensor:
    """Return two shares over all chunks, (2,) fp32.

    The first is the share of Σ|d-logits| that was skipped. The second is the share of the columns
    that were kept.
    """
    dropped, total = torch.zeros(2, dtype=torch.float64, device=device)
    for chunk in chunks:
        dropped = dropped + chunk.dropped
        total = total + chunk.total
    elements = sum(x.elements for x in chunks)
    stayed = sum(x.columns for x in chunks) / elements if elements else 1.0
    share = dropped / total.clamp(min=torch.finfo(torch.float64).tiny)
    return torch.stack([share, torch.full_like(share, stayed)]).float()


def column_masses(d: Tensor, scale: Tensor | None = None) -> Tensor:
    """Return the mass Σ_t |scale_t·d_tj| of every column of d-logits (C, V), as (V,) fp64."""
    masses = torch.zeros(d.shape[1], dtype=torch.float64, device=d.device)
    for start in range(0, d.shape[0], ROWS):
        block = widened(d[start : start + ROWS]).abs()
        if scale is not None:
            block = block * scale[start : start + ROWS, None].abs()
        # Sum in fp32 within a block and in fp64 across blocks.
        masses += block.sum(0, dtype=torch.float32)
    return masses


def heavy_columns(masses: Tensor, tolerance: float) -> tuple[Tensor, Tensor, Tensor]:
    """Select the columns that the filter keeps.

    Args:
        masses: (V,) Σ|d-logits| of each column.
        tolerance: share of the sum of all masses that may be skipped.

    Returns:
        The indices of the kept columns, (n,) in ascending order; the sum of the masses of the
        skipped columns, 0-d; and the sum of all masses, 0-d.
    """
    # If a mass is NaN, the total is NaN, and no column satisfies the comparison below. No column is
    # skipped then, so the NaN stays visible in the gradients.
    lightest, order = masses.sort()
    summed = lightest.cumsum(0)
    total = summed[-1]
    out = int((summed <= tolerance * total).sum())
    dropped = summed[out - 1] if out else torch.zeros_like(total)
    return order[out:].sort().values, dropped, total
