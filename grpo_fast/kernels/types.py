"""The types that kernels and passes share. Rows: T active tokens, or C of a chunk."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from grpo_fast.kernels.support import SupportRows

# (lse, logps, entropy or None) of some rows, each (C,) fp32
RowStats = tuple[Tensor, Tensor, Tensor | None]

# Rows per GEMM are a multiple of this: below 8 rows MKL sums in another order.
ROW_MULTIPLE = 32
# Numbers from 0 to 2^30 with ten binary digits (Positive16 in csrc/vec/storage.h), no torch dtype.
POSITIVE16 = torch.int16


class LogitTransform(NamedTuple):
    """How raw logits become the distribution's.

    z = softcap · tanh(logit_scale · raw / softcap) / temperature
    """

    logit_scale: float = 1.0
    softcap: float | None = None
    temperature: float | Tensor = 1.0  # or (C,) fp32 with one value per row

    def rows(self, index: slice | Tensor) -> LogitTransform:
        if isinstance(self.temperature, Tensor):
            return self._replace(temperature=self.temperature[index])
        return self


class ActiveRows(NamedTuple):
    """The T rows that have a target, their place among the caller's N, and their logits' transform."""

    num_rows: int  # N
    active_index: Tensor | None  # (T,) int64: which of the N rows; None: all, T = N
    target_ids: Tensor  # (T,) int64, inside [0, V)
    transform: LogitTransform  # temperature: a float, or (T,)
    hidden_index: Tensor | None  # (T,) int64: the row of hidden that predicts each target; None: t
    repeats: bool = False  # a row of hidden may predict several targets: its gradients are summed
    support: SupportRows | None = None  # None: every row has the whole vocabulary

    def select(self, index: Tensor | None) -> ActiveRows:
        """Some of the active rows, in this order, with the whole vocabulary; None: all."""
        if index is None:
            return self._replace(support=None)
        whole = self.active_index, self.hidden_index
        active, hidden = (index if x is None else x[index] for x in whole)
        transform = self.transform.rows(index)
        targets = self.target_ids[index]
        return ActiveRows(self.num_rows, active, targets, transform, hidden, self.repeats)

    def active(self, x: Any) -> Any:
        """(N,) → (T,); None of None."""
        return x if self.active_index is None or x is None else x.index_select(0, self.active_index)

    def to_rows(self, x: Any, fill: int = 0) -> Any:
        """(T,) → (N,), `fill` where a row is not active; None of None."""
        if self.active_index is None or x is None:
            return x
        return x.new_full((self.num_rows,), fill).index_copy_(0, self.active_index, x)


class HeadTensors(NamedTuple):
    hidden: Tensor  # (N, H)
    weight: Tensor  # (V, H)
    bias: Tensor | None  # (V,)

    def no_gradients(self) -> tuple[Tensor, Tensor, Tensor]:
        return (self.hidden.new_empty(0),) * 3


class ChunkRows(NamedTuple):
    hidden: Tensor  # (padded C, H)
    target_ids: Tensor  # (C,) int64
    transform: LogitTransform


class RowLoss(NamedTuple):
    """Results of `row_loss_` for every row, (C,) fp32, beside the d-logits it writes."""

    lse: Tensor
    logps: Tensor
    entropy: Tensor | None
    losses: Tensor  # policy_weights·ℓ + kl_weights·KL
    grad_logps: Tensor  # its derivative


class Wanted(NamedTuple):
    hidden: bool
    weight: bool
    bias: bool


class AddedRows(NamedTuple):
    """Rows that a matrix gets on top in fp32: total[ids[t]] += coefficients[t]·values[rows[t]].

    Where the coefficient is 0 nothing is added, whatever `values` holds; equal ids are added in
    their order.
    """

    coefficients: Tensor  # (T,) fp32
    values: Tensor  # (R, N)
    ids: Tensor | None = None  # (T,) int64, None: t
    rows: Tensor | None = None  # (T,) int64, None: t

    def terms(self) -> Tensor:
        """(T, N) fp32: what is added, one row for each coefficient."""
        count = len(self.coefficients)
        values = self.values[:count] if self.rows is None else self.values[self.rows]
        return scaled_rows(values, self.coefficients)

    def add_to_(self, total: Tensor) -> None:
        """Add the rows to (V, N) fp32 sums, in a pass of its own."""
        assert self.ids is not None
        add_rows_(total, self.ids, self.terms())


class Dominant(NamedTuple):
    """n elements of a matrix (C, V) in 16 bits that make up more than a 16th of their row; at most
    16 of a row.

    A row of dH is Σ_j d_j·(W_j - W_target). Where one j has most of it and W_j resembles W_target
    the two nearly cancel, and the digits that d_j lost are a large part of what is left: that is
    added to dH in fp32.
    """

    rows: Tensor  # (n,) int64
    columns: Tensor  # (n,) int64
    values: Tensor  # (n,) fp32

    def rounding_errors(self, matrix: Tensor) -> Dominant:
        """The rounding errors of the values, where the product takes `matrix` rounded to bf16."""
        taken = widened(matrix[self.rows, self.columns]).to(torch.bfloat16).float()
        return self._replace(values=self.values - taken)

    def of_rows(self, rows: Tensor, count: int) -> Dominant:
        """The elements in some of `count` rows, which are numbered anew."""
        places = torch.full((count,), -1).index_copy_(0, rows, torch.arange(len(rows)))[self.rows]
        return self._replace(rows=places)._where(places >= 0)

    def of_columns(self, columns: Tensor) -> Dominant:
        return self._where(torch.isin(self.columns, columns))

    def added_to(self, targets: AddedRows, scales: Tensor) -> AddedRows:
        """The rows for dH: one target for each row of the result, and these, times the scale (C,)
        of their row.
        """
        assert targets.rows is not None
        return AddedRows(
            torch.cat([targets.coefficients, scales[self.rows] * self.values]),
            targets.values,
            ids=torch.cat([torch.arange(len(targets.coefficients)), self.rows]),
            rows=torch.cat([targets.rows, self.columns]),
        )

    def _where(self, mask: Tensor) -> Dominant:
        return Dominant(*(x[mask] for x in self))


class Coefficients(NamedTuple):
    """d-logits = by_row[:, None]·exponentials, plus by_target in the targets' columns."""

    by_row: Tensor  # (padded C,) fp32
    by_target: Tensor  # (padded C,) fp32
    target_ids: Tensor  # (C,)
    rounding_errors: Dominant | None = None  # of elements that the product rounds

    def select(self, rows: Tensor) -> Coefficients:
        by_row, by_target = (pad_rows(x.index_select(0, rows)) for x in self[:2])
        errors = (
            None
            if self.rounding_errors is None
            else self.rounding_errors.of_rows(rows, len(self.target_ids))
        )
        return Coefficients(by_row, by_target, self.target_ids.index_select(0, rows), errors)


class Exponentials(NamedTuple):
    """Results of `head_exponentials` for its rows, beside the matrix E it writes.

    The gradient of Σ g·logp with respect to the raw logits is (g·unit)[:, None]·E, with
    g·target_unit in the targets' columns, where E is 0. Every E is finite.
    """

    stats: RowStats
    unit: Tensor  # (T,) fp32
    target_unit: Tensor  # (T,) fp32
    dominant: Dominant | None  # of a matrix in 16 bits: what its rounding must not lose


def pick(index: slice | Tensor, *tensors: Tensor | None) -> tuple[Any, ...]:
    return tuple(None if x is None else x[index] for x in tensors)


def scaled_rows(x: Tensor, coefficients: Tensor) -> Tensor:
    """(C, H) fp32 coefficients[:, None]·x, exact zeros where the coefficient is 0, also of NaN."""
    return torch.where(coefficients[:, None] == 0, 0.0, x * coefficients[:, None])


def add_rows_(total: Tensor, index: Tensor, rows: Tensor) -> None:
    """total[index] += rows; equal indices in their order, whatever the device and its threads.

    On a GPU index_put_ sorts and index_add_ races; on a CPU index_add_ goes through the rows and
    index_put_ races.
    """
    if total.is_cuda:
        total.index_put_((index,), rows, accumulate=True)
    else:
        total.index_add_(0, index, rows)


def padded(count: int) -> int:
    return -(-count // ROW_MULTIPLE) * ROW_MULTIPLE


def pad_rows(x: Tensor) -> Tensor:
    """(C, …) → (padded C, …), zeros added."""
    missing = padded(x.shape[0]) - x.shape[0]
    return torch.nn.functional.pad(x, (0, 0) * (x.dim() - 1) + (0, missing)) if missing else x


def detached(x: Tensor) -> Tensor:
    """Autograd never looks into the kernels. (A detach costs a microsecond.)"""
    return x.detach() if x.requires_grad else x


def vector(x: Tensor | None) -> Tensor | None:
    """Per-row values as the kernels read them (`dense_vector`); None of None."""
    return None if x is None else dense_vector(x)


def dense_vector(x: Tensor) -> Tensor:
    """Per-row values as the kernels read them: fp32, unit stride."""
    if x.dtype == torch.float32 and x.is_contiguous() and not x.requires_grad:
        return x
    return detached(x).float().contiguous()


def transform_arguments(
    transform: LogitTransform,
) -> tuple[float, float | None, float, Tensor | None]:
    """`logit_scale, softcap, temperature, temperatures` of a kernel; no integer among them."""
    scale = float(transform.logit_scale)
    softcap = None if transform.softcap is None else float(transform.softcap)
    if isinstance(transform.temperature, Tensor):
        return scale, softcap, 1.0, vector(transform.temperature)
    return scale, softcap, float(transform.temperature), None


def contiguous_rows(x: Tensor) -> Tensor:
    """Detached, with neighbours along the last axis beside each other: for the C++ kernels."""
    x = detached(x)
    return x if x.stride(-1) == 1 else x.contiguous()


def widened(x: Tensor) -> Tensor:
    """16-bit numbers, POSITIVE16 included, in fp32; others as they are."""
    if x.dtype == POSITIVE16:
        bits = x.to(torch.int32) & 0xFFFF
        return torch.where(bits == 0, 0, (bits << 14) + (29 << 23)).view(torch.float32)
    return x if x.dtype.itemsize >= 4 else x.float()
