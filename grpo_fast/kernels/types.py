"""Types that the kernels and the passes over the LM head share, and small functions on tensors.

In shapes, N is the number of the caller's rows, T the number of active rows (rows with a target), R
the number of active rows with a token set, nnz the number of ids in all sets, and C the number of
rows in one chunk. `Support` is public, and its T counts all targets, also masked ones. The other
types are internal.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard, TypeVar

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

Values = TypeVar("Values", Tensor, Tensor | None)  # None stays None
Context = Any  # an autograd context, on which torch and our functions set attributes
# Statistics of rows: lse, logps, and entropy or None, each (C,) fp32.
RowStats = tuple[Tensor, Tensor, Tensor | None]
# Chunks are padded to a multiple of this number of rows. With fewer rows, a GEMM of torch may add
# in a different order. Padding does not prevent this for all numbers of rows.
ROW_MULTIPLE = 32
# Dtype of torch tensors that store Positive16 numbers, for which torch has no dtype. Positive16 is
# a 16-bit type of csrc (csrc/vec/storage.h) for numbers from 0 to 2^30, with ten significant bits.
POSITIVE16 = torch.int16


# ----------------------------------------------------------------------------- Rows and the LM head
class LogitTransform(NamedTuple):
    """The transform from raw logits to the logits of the distribution.

    z = softcap · tanh(logit_scale · raw / softcap) / temperature. If softcap is None, tanh is not
    applied: z = logit_scale · raw / temperature.
    """

    logit_scale: float = 1.0
    softcap: float | None = None
    temperature: float = 1.0

    @classmethod
    def of(cls, logit_scale: float, softcap: float | None, temperature: float) -> LogitTransform:
        """Return the transform with numbers of the type float, which Triton kernels expect."""
        softcap = None if softcap is None else float(softcap)
        return cls(float(logit_scale), softcap, float(temperature))


class HeadTensors(NamedTuple):
    """The hidden states, and the weight and bias of the LM head that receives them."""

    hidden: Tensor  # (N, H)
    weight: Tensor  # (V, H)
    bias: Tensor | None  # (V,)


class HeadInputs(NamedTuple):
    """Inputs of the kernels that start from hidden states.

    A target id outside [0, V) is never used as an index.
    """

    hidden: Tensor  # (T, H) fp32, bf16 or fp16, any strides
    weight: Tensor  # (V, H), in the dtype of `hidden`
    bias: Tensor | None  # (V,)
    target_ids: Tensor  # (T,) int64
    transform: LogitTransform
    # The tensor descriptors (TMA) of a GPU call, keyed by matrix and tile size. `linear.prepared`
    # sets an empty dict.
    descriptors: dict[tuple[int, int, int], Any] | None = None


class LogitRows(NamedTuple):
    """Raw logits of C rows and their targets, as the row kernels read them."""

    logits: Tensor  # (C, V), or (1, nnz) with `offsets`
    target_ids: Tensor  # (C,) int64; with `offsets`, the position of each target in its row
    transform: LogitTransform
    # (C+1,) bounds of rows of unequal length, which are stored one after another; None: (C, V)
    offsets: Tensor | None = None


class ActiveRows(NamedTuple):
    """The T active rows (rows with a target) among the caller's N rows, and their targets."""

    num_rows: int  # N
    active_index: Tensor | None  # (T,) int64: positions among the N rows; None: all, T = N
    target_ids: Tensor  # (T,) int64. An id outside [0, V) marks a row without a target.
    transform: LogitTransform
    hidden_index: Tensor | None  # (T,) int64: row of `hidden` that predicts each target
    repeats: bool = False  # one row of `hidden` may predict several targets
    support: SupportRows | None = None  # None: all rows use the full vocabulary

    def select(self, index: Tensor | None) -> ActiveRows:
        """Return the active rows at the positions `index`, in that order and without token sets.

        If `index` is None, all rows are returned.
        """
        if index is None:
            return self._replace(support=None)
        indices = self.active_index, self.hidden_index
        # None means all rows in order, so indexing it with `index` gives `index` itself.
        active, hidden = (index if x is None else x[index] for x in indices)
        targets = self.target_ids[index]
        return ActiveRows(self.num_rows, active, targets, self.transform, hidden, self.repeats)

    def active(self, x: Values) -> Values:
        """Select the T active rows from x, which has N rows. Return None if x is None."""
        return x if x is None else elements_at(x, self.active_index)

    def to_rows(self, x: Values, fill: int = 0) -> Values:
        """Scatter the values of the active rows, (T,), into a tensor with one value per row, (N,).

        The other rows get the value `fill`. If x is None, the result is None.
        """
        if self.active_index is None or x is None:
            return x
        return x.new_full((self.num_rows,), fill).index_copy_(0, self.active_index, x)


# --------------------------------------------------------------------------------------- Token sets
class Support(NamedTuple):
    """The ids that a truncating sampler (top-p, top-k) kept for each token.

    With `support=`, the softmax, log-probability and entropy of row t use only the kept ids S_t, as
    the sampler did. Gradients outside S_t are exactly 0::

        z = z.masked_fill(~is_kept, -inf)          # z as in linear_logps, before log_softmax

    The cost is proportional to Σ_t |S_t| logits instead of T·V. Compute the old, reference and
    sampling logps with the same sets as the new logps. There is one set for each of the T targets,
    in the order of `target_ids.reshape(-1)`. An empty set means no restriction: the row uses the
    full vocabulary. The set of a target is ignored if the target is masked or -100.

    Attributes:
        ids: (nnz,), int32 or int64. The ids of all sets, one set after another. They are in [0, V).
            No set contains an id twice. Each active target must be in its set.
        offsets: (T+1,), int64. The bounds of the sets, ascending from 0 to nnz: S_t is
            ids[offsets[t] : offsets[t + 1]].

    Example:
        >>> import torch
        >>> from grpo_fast import Support, linear_logps
        >>> support = Support(ids=torch.tensor([3, 7, 5]), offsets=torch.tensor([0, 2, 3]))
        >>> target_ids = torch.tensor([7, 5])
        >>> hidden, lm_head_weight = torch.randn(2, 16), torch.randn(100, 16)
        >>> logps = linear_logps(hidden, lm_head_weight, target_ids, support=support)
        >>> float(logps[1])
        0.0
    """

    ids: Tensor
    offsets: Tensor

    @classmethod
    def join(
        cls,
        sets: Sequence[tuple[Tensor, Tensor] | None],
        lengths: Sequence[int],
        device: torch.device | str,
    ) -> Support | None:
        """Concatenate the token sets of several completions. Return None if no completion has sets.

        Args:
            sets: one pair (ids, counts) for each completion. `ids` contains the sets of its tokens,
                one after another. `counts` is a (length,) int64 tensor with the size of each set.
                None: the completion was sampled from the full vocabulary.
            lengths: number of tokens in each completion.
            device: the device of the result.
        """
        drawn = [one for one in sets if one is not None]
        if not drawn:
            return None
        # An empty set means the full vocabulary. If a completion has no sets, give each of its
        # tokens an empty set.
        counts = [
            torch.zeros(length, dtype=torch.int64) if one is None else one[1]
            for one, length in zip(sets, lengths, strict=True)
        ]
        offsets = torch.nn.functional.pad(torch.cat(counts).cumsum(0), (1, 0))
        return cls(torch.cat([ids for ids, _ in drawn]).to(device), offsets.to(device))


class SupportRows(NamedTuple):
    """The R active rows that have a token set, and the ids of their sets, one set after another."""

    row_index: Tensor | None  # (R,) int64: positions among the T active rows; None: all
    dense_index: Tensor | None  # (T - R,) int64: rows without a set; None: there are none
    ids: Tensor  # (nnz,) int64: columns of the logits
    offsets: Tensor  # (R+1,) int64, ascending from 0 to nnz: no row is empty
    places: Tensor  # (R,) int64: position of the row's target in its set
    hidden_index: Tensor | None = None  # (R,) int64: row of `hidden` for each set; None: row r

    @property
    def rows(self) -> Tensor:
        """Return the row number of each id in the sets, (nnz,) int64."""
        return rows_of(self.offsets, len(self.ids))

    @property
    def hidden_rows(self) -> Tensor:
        """Return the row of `hidden` for each id in the sets, (nnz,) int64."""
        return self.rows if self.hidden_index is None else self.hidden_index[self.rows]


def rows_of(offsets: Tensor, count: int) -> Tensor:
    """Return the row number of each element of a vector that stores rows of unequal length.

    Args:
        offsets: (R+1,) bounds of the rows in the vector.
        count: number of elements of the vector.
    """
    # With `right=True`, the first element of a row belongs to that row, not to the previous one.
    return torch.searchsorted(offsets[1:], torch.arange(count, device=offsets.device), right=True)


class HeadRows(NamedTuple):
    """Results of an LM head for R rows with a token set: logits, statistics and slopes.

    A slope is the derivative of a row's logp with respect to the hidden state of the row.
    """

    raw: Tensor  # (nnz,) hidden·W[id] + bias[id], in fp32 at least
    stats: tuple[Tensor, Tensor, Tensor | None]  # RowStats of R rows
    slopes: Tensor | None  # (R, H): derivative of each logp with respect to its row of `hidden`


# ----------------------------------------------------------------------------- Losses and gradients
class RowLoss(NamedTuple):
    """Per-row results of `row_loss_`, (C,) fp32 each.

    The kernel writes the gradient with respect to the logits to its `out` argument.
    """

    lse: Tensor
    logps: Tensor
    entropy: Tensor | None
    losses: Tensor  # policy_weights·ℓ + kl_weights·KL
    grad_logps: Tensor  # derivative of `losses` with respect to logps


class Wanted(NamedTuple):
    """Flags that specify which of the gradients dH, dW and db a pass must compute."""

    hidden: bool
    weight: bool
    bias: bool


class AddedRows(NamedTuple):
    """Scaled rows that are added to a matrix in fp32.

    For every t, coefficients[t]·values[rows[t]] is added to row ids[t] of the matrix. Terms with a
    coefficient of 0 are skipped, even if `values` contains NaN. Terms with equal ids are added in
    the order of t.
    """

    coefficients: Tensor  # (T,) fp32
    values: Tensor  # (R, N)
    ids: Tensor | None = None  # (T,) int64; None: ids[t] = t
    rows: Tensor | None = None  # (T,) int64; None: rows[t] = t


class Dominant(NamedTuple):
    """The fp32 values of the dominant elements of a 16-bit matrix (C, V).

    An element is dominant if it makes up more than 1/16 of the sum of its row, so a row has at most
    16 dominant elements. Their rounding errors are added to dH in fp32, because they may be a large
    part of dH. A row of dH is Σ_j d_j·(W_j - W_target). If one j dominates the row and W_j is close
    to W_target, the difference nearly cancels, and the rounding error of d_j becomes a large part
    of the result.
    """

    rows: Tensor  # (n,) int64
    columns: Tensor  # (n,) int64
    values: Tensor  # (n,) fp32

    def rounding_errors(self, matrix: Tensor) -> Dominant:
        """Return the dominant elements with their rounding errors as values.

        A rounding error is the fp32 value minus the bf16 value that the matrix product uses.
        """
        # The matrix product rounds the stored elements to bf16, so apply the same rounding here.
        taken = widened(matrix[self.rows, self.columns]).to(torch.bfloat16).float()
        return self._replace(values=self.values - taken)

    def of_rows(self, rows: Tensor, count: int) -> Dominant:
        """Return the dominant elements in the given rows of the matrix, which has `count` rows.

        In the result, the row numbers are positions in `rows`.
        """
        # The new row number of each element, or -1 if its row was not selected.
        places = torch.full((count,), -1).index_copy_(0, rows, torch.arange(len(rows)))[self.rows]
        return self._replace(rows=places)._where(places >= 0)

    def of_columns(self, columns: Tensor) -> Dominant:
        """Return the dominant elements that are in the given columns."""
        return self._where(torch.isin(self.columns, columns))

    def added_to(self, targets: AddedRows, scales: Tensor) -> AddedRows:
        """Return the terms to add to dH: `targets`, followed by one term for each dominant element.

        Args:
            targets: coefficients and weight rows of the targets, one for each row of dH in order.
            scales: (C,) factor by which the elements of each row are multiplied.
        """
        assert targets.rows is not None
        return AddedRows(
            torch.cat([targets.coefficients, scales[self.rows] * self.values]), targets.values,
            ids=torch.cat([torch.arange(len(targets.coefficients)), self.rows]),
            rows=torch.cat([targets.rows, self.columns]),
        )  # fmt: skip

    def _where(self, mask: Tensor) -> Dominant:
        return Dominant(*(x[mask] for x in self))


class Coefficients(NamedTuple):
    """Factors that turn exponentials into d-logits.

    The d-logits are by_row[:, None]·exponentials, plus by_target in the target columns.
    """

    by_row: Tensor  # (padded C,) fp32
    by_target: Tensor  # (padded C,) fp32
    target_ids: Tensor  # (C,)
    rounding_errors: Dominant | None = None  # errors of the dominant 16-bit exponentials

    def select(self, rows: Tensor) -> Coefficients:
        """Return the given rows, padded with zeros to a multiple of ROW_MULTIPLE."""
        by_row, by_target = (pad_rows(x.index_select(0, rows)) for x in self[:2])
        errors = self.rounding_errors
        errors = None if errors is None else errors.of_rows(rows, len(self.target_ids))
        return Coefficients(by_row, by_target, self.target_ids.index_select(0, rows), errors)


class Exponentials(NamedTuple):
    """Per-row results of `head_exponentials`, which also writes exponentials E to `out`.

    E is a (T, V) matrix with one exponential for each logit. The gradient of Σ g·logp with respect
    to the raw logits is (g·unit)[:, None]·E, plus g·target_unit in the target columns, where E is
    0. All elements of E are finite.
    """

    stats: RowStats
    unit: Tensor | None  # (T,) fp32; None on a GPU
    target_unit: Tensor | None  # (T,) fp32; None on a GPU
    dominant: Dominant | None  # elements of a 16-bit E whose rounding errors matter
    # (T,) fp32 raw logits of the targets, from which gpu/gradients.py computes both units
    raw_target: Tensor | None = None
    # If a loss was requested: losses and grad_logps, (T,), and by_row and by_target, (padded T,)
    loss: tuple[Tensor, ...] | None = None


# ----------------------------------------------------------------------------- Functions on tensors
def rows_at(x: Tensor, index: slice | Tensor) -> Tensor:
    """Return the rows x[index].

    If they are all rows of x, return x, which saves the host the time of a view.
    """
    is_all = isinstance(index, slice) and (index.start, index.stop) == (0, x.shape[0])
    return x if is_all else x[index]


def elements_at(x: Tensor, index: Tensor | None) -> Tensor:
    """Return the elements of x at the positions `index`, or x if `index` is None."""
    return x if index is None else x.index_select(0, index)


def pick(index: slice | Tensor, *tensors: Tensor | None) -> tuple[Any, ...]:
    """Return the rows `index` of each tensor, and None for each argument that is None."""
    return tuple([None if x is None else rows_at(x, index) for x in tensors])


def scaled_rows(x: Tensor, coefficients: Tensor) -> Tensor:
    """Return coefficients[:, None]·x, (C, H) fp32.

    Rows with coefficient 0 are exactly 0, even if x contains NaN.
    """
    return torch.where(coefficients[:, None] == 0, 0.0, x * coefficients[:, None])


def add_rows_(total: Tensor, index: Tensor, rows: Tensor) -> None:
    """Add rows in place, total[index] += rows, in a reproducible order.

    Rows with equal indices are added one after another. On a GPU, index_add_ is not deterministic,
    but index_put_ sorts the indices. On a CPU, index_put_ is not deterministic, but index_add_ is
    sequential.
    """
    if total.is_cuda:
        total.index_put_((index,), rows, accumulate=True)
    else:
        total.index_add_(0, index, rows)


def padded(count: int) -> int:
    """Return `count` rounded up to a multiple of ROW_MULTIPLE."""
    return -(-count // ROW_MULTIPLE) * ROW_MULTIPLE


def pad_rows(x: Tensor) -> Tensor:
    """Append rows of zeros, so that the number of rows is a multiple of ROW_MULTIPLE."""
    missing = padded(x.shape[0]) - x.shape[0]
    return torch.nn.functional.pad(x, (0, 0) * (x.dim() - 1) + (0, missing)) if missing else x


def is_sharded(x: object) -> TypeGuard[DTensor]:
    """Return whether x is a DTensor, without importing torch.distributed.tensor."""
    # Look for an attribute that only DTensors have, because importing torch.distributed.tensor is
    # slow.
    return type(x) is not Tensor and hasattr(type(x), "full_tensor")


def detached(x: Tensor) -> Tensor:
    """Return x without its autograd history.

    A tensor that does not require grad is returned unchanged, which saves a microsecond.
    """
    return x.detach() if x.requires_grad else x


def vector(x: Values) -> Values:
    """Convert a vector of per-row values to the form that the kernels read. None stays None.

    The result is fp32 and contiguous, and has no autograd history.
    """
    # Return early if nothing must be converted, which is common and saves three torch calls.
    if x is None or (x.dtype == torch.float32 and x.is_contiguous() and not x.requires_grad):
        return x
    return detached(x).float().contiguous()


def contiguous_rows(x: Tensor) -> Tensor:
    """Return x without autograd history and with contiguous rows, as the C++ kernels require."""
    x = detached(x)
    return x if x.stride(-1) == 1 else x.contiguous()


def widened(x: Tensor) -> Tensor:
    """Convert a 16-bit tensor, including POSITIVE16, to fp32. Return other tensors unchanged."""
    if x.dtype == POSITIVE16:
        # The stored numbers are unsigned, but the conversion from int16 to int32 extends the sign
        # bit. Clear the upper half of the bits.
        bits = x.to(torch.int32) & 0xFFFF
        return torch.where(bits == 0, 0, (bits << 14) + (29 << 23)).view(torch.float32)
    return x if x.dtype.itemsize >= 4 else x.float()
