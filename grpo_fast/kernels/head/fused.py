"""dH and dW from exponentials and their coefficients, with the kernels of gpu/gradients.py around
the products.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from grpo_fast.kernels.head.products import accumulate_outer, is_wide, matmul_narrow
from grpo_fast.kernels.types import Dominant, pad_rows
from grpo_fast.kernels.workspace import unset


class Coefficients(NamedTuple):
    """Factors from exponentials to d-logits: by_row[:, None]·matrix, and by_target in the targets'
    columns.
    """

    by_row: Tensor  # (padded C,) fp32
    by_target: Tensor  # (padded C,) fp32
    target_ids: Tensor  # (C,)
    rest: Dominant | None = None  # of elements that the product rounds

    def select(self, rows: Tensor) -> Coefficients:
        """Those of some rows, padded again."""
        by_row, by_target = (pad_rows(x.index_select(0, rows)) for x in self[:2])
        rest = None if self.rest is None else self.rest.of_rows(rows, len(self.target_ids))
        return Coefficients(by_row, by_target, self.target_ids.index_select(0, rows), rest)


def hidden_gradient(
    doors: Any,
    matrix: Tensor,  # (padded C, V)
    by: Coefficients,
    weight: Tensor,  # (V, H)
    out: Tensor | None = None,  # (C, H), or (N, H) with `places`
    places: Tensor | None = None,  # (C,)
) -> Tensor:
    """dH of C rows, in fp32 unless `out` says otherwise."""
    product = matmul_narrow(matrix, weight)
    if out is None:
        out = unset(torch.empty_like, product[: by.target_ids.shape[0]])
    return doors.write_hidden_(out, product, by.by_row, by.by_target, by.target_ids, weight, places)


def weight_sum(
    doors: Any,
    total: Tensor | None,  # (V, H) fp32
    matrix: Tensor,  # (padded C, V)
    by: Coefficients,
    h: Tensor,  # (padded C, H)
    weight: Tensor,  # (V, H)
    *,
    is_only: bool,
) -> Tensor:
    """total += dW of C rows; of an only chunk in the 16 bits of the weight, rounded once."""
    scaled = doors.scaled_hidden(h, by.by_row)
    ids, order = by.target_ids.sort(stable=True)
    total = accumulate_outer(total, matrix, scaled, weight, is_only=is_only)
    if is_wide(total):
        doors.add_targets_(total, ids, order, by.by_target, h)
    else:
        doors.add_targets_narrow_(total, ids, order, by.by_target, h, matrix, scaled)
    return total
