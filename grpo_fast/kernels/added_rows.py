"""Rows on top of a matrix product: what a weight's product with the target column left out adds up to."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class AddedRows(NamedTuple):
    """Rows that a matrix gets on top in fp32: total[ids[t]] += coefficients[t]·values[rows[t]].

    Where the coefficient is 0 nothing is added, whatever `values` holds; equal ids are added in their order.
    """

    coefficients: Tensor  # (T,) fp32
    values: Tensor  # (R, N)
    ids: Tensor | None = None  # (T,) int64, None: t
    rows: Tensor | None = None  # (T,) int64, None: t

    def terms(self) -> Tensor:
        """(T, N) fp32: what is added, one row for each coefficient."""
        values = self.values[: len(self.coefficients)] if self.rows is None else self.values.index_select(0, self.rows)
        return scaled_rows(values, self.coefficients)

    def add_to_(self, total: Tensor) -> None:
        """The same as a pass of its own over (V, N) fp32 sums."""
        assert self.ids is not None
        add_rows_(total, self.ids, self.terms())

    def by_id(self) -> tuple[Tensor, Tensor]:
        """ids in ascending order, and the t of each."""
        if self.ids is None:
            places = torch.arange(len(self.coefficients))
            return places, places
        ids, order = self.ids.sort(stable=True)
        return ids, order


def scaled_rows(x: Tensor, coefficients: Tensor) -> Tensor:
    """(C, H) fp32 coefficients[:, None]·x, exact zeros where the coefficient is 0 (x may hold NaN there)."""
    return torch.where(coefficients[:, None] == 0, 0.0, x * coefficients[:, None])


def add_rows_(total: Tensor, index: Tensor, rows: Tensor) -> None:
    """total[index] += rows; equal indices are summed in their order, on every device and with any number of threads.

    On a GPU index_put_ sorts and index_add_ races; on a CPU index_add_ goes through the rows and index_put_ races.
    """
    if total.is_cuda:
        total.index_put_((index,), rows, accumulate=True)
    else:
        total.index_add_(0, index, rows)
