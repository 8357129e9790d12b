"""Weights in 16 bits that make up more than a 16th of their row: what their rounding leaves is added to dH in fp32.

A row of dH is Σ_j d_j·(W_j - W_target). Where one j has most of it and W_j resembles W_target the two nearly cancel,
and the digits that d_j lost are a large part of what is left.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from grpo_fast.kernels.added_rows import AddedRows
from grpo_fast.kernels.gemm_cpu import widened


class DominantWeights(NamedTuple):
    """n weights of a matrix (C, V), by row and column; at most 16 of a row."""

    rows: Tensor  # (n,) int64
    columns: Tensor  # (n,) int64
    values: Tensor  # (n,) fp32

    def rest(self, matrix: Tensor) -> DominantWeights:
        """What is left of the values when the product has taken those of `matrix`, rounded to bf16."""
        taken = widened(matrix[self.rows, self.columns]).to(torch.bfloat16).float()
        return self._replace(values=self.values - taken)

    def of_rows(self, rows: Tensor, count: int) -> DominantWeights:
        """Those of some of `count` rows, which are numbered anew."""
        places = torch.full((count,), -1).index_copy_(0, rows, torch.arange(len(rows)))[self.rows]
        return self._replace(rows=places)._where(places >= 0)

    def of_columns(self, columns: Tensor) -> DominantWeights:
        """Those in some columns, whose numbers stay."""
        return self._where(torch.isin(self.columns, columns))

    def added_to(self, targets: AddedRows, scales: Tensor) -> AddedRows:
        """The rows for dH: one target for each row of the result, and these, times the scale (C,) of their row."""
        assert targets.rows is not None
        return AddedRows(
            torch.cat([targets.coefficients, scales[self.rows] * self.values]),
            targets.values,
            ids=torch.cat([torch.arange(len(targets.coefficients)), self.rows]),
            rows=torch.cat([targets.rows, self.columns]),
        )

    def _where(self, kept: Tensor) -> DominantWeights:
        return DominantWeights(*(x[kept] for x in self))
