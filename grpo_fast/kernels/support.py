"""Types for the token sets that a truncating sampler (top-p, top-k) kept.

`Support` is the public type. `SupportRows` and `HeadRows` are internal.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


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
