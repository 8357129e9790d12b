"""The ids among which a sampler drew each token, where it kept less than the whole vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Support(NamedTuple):
    """The kept sets of a sampler that truncates (top-p, top-k), S_t for each target.

    With `support=` softmax, log-probability and entropy of row t are over S_t alone, as the sampler
    had it, and gradients outside of S_t are exactly 0::

        z = z.masked_fill(~is_kept, -inf)          # z as in linear_logps, before the log_softmax

    The work is that of Σ_t |S_t| logits instead of T·V. Old, reference and sampling logps belong to
    the same sets. One set for each of the T targets, in the order of `target_ids.reshape(-1)`; an
    empty one stands for the whole vocabulary, and both kinds may stand in one batch. What belongs
    to a masked target, or to one of -100, is not looked at.

    Attributes:
        ids: (nnz,) int32 or int64 in [0, V), the sets one after another; no id twice in one set,
            and each active target in its own, at any place.
        offsets: (T+1,) int64: S_t = ids[offsets[t] : offsets[t + 1]], from 0 to nnz.
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
        """The sets of several completions, one after another; None where none has sets.

        Args:
            sets: (ids, counts) of each completion: the ids of its tokens' sets, one after another,
                and (length,) int64 how many each has. None: it was drawn from the whole vocabulary.
            lengths: its number of tokens.
        """
        drawn = [one for one in sets if one is not None]
        if not drawn:
            return None
        counts = [
            torch.zeros(length, dtype=torch.int64) if one is None else one[1]
            for one, length in zip(sets, lengths, strict=True)
        ]
        offsets = torch.nn.functional.pad(torch.cat(counts).cumsum(0), (1, 0))
        return cls(torch.cat([ids for ids, _ in drawn]).to(device), offsets.to(device))


class SupportRows(NamedTuple):
    """Rows of logits that exist only where the sampler looked: R of the T active rows."""

    row_index: Tensor | None  # (R,) int64: which of the T rows; None: all, R = T
    dense_index: Tensor | None  # (T - R,) int64: the rows with the whole vocabulary; None: none
    ids: Tensor  # (nnz,) int64, columns of the logits
    offsets: Tensor  # (R+1,) int64, ascending from 0 to nnz: no row is empty
    places: Tensor  # (R,) int64: where the row's target stands in it, from 0

    @property
    def rows(self) -> Tensor:
        return rows_of(self.offsets, len(self.ids))

    def select(self, x: Tensor) -> Tensor:
        return x if self.row_index is None else x.index_select(0, self.row_index)

    def merge_rows(self, own: Tensor, others: Tensor | None) -> Tensor:
        """(T,) from the values of these rows (R,), and of the others."""
        if self.row_index is None:
            return own
        assert self.dense_index is not None and others is not None
        merged = own.new_empty(len(own) + len(others))
        return merged.index_copy_(0, self.row_index, own).index_copy_(0, self.dense_index, others)


def rows_of(offsets: Tensor, count: int) -> Tensor:
    """(count,) int64: the row of each place in a vector that offsets (R+1,) cut into rows."""
    # From the right: the place where a row begins is no longer in the one before.
    return torch.searchsorted(offsets[1:], torch.arange(count, device=offsets.device), right=True)


class HeadRows(NamedTuple):
    """Logits, statistics and slopes of the rows with a support."""

    raw: Tensor  # (nnz,) hidden·W[id] + bias[id], in fp32 at least
    stats: tuple[Tensor, Tensor, Tensor | None]  # RowStats of R rows
    slopes: Tensor | None  # (R, H) the derivative of every logp with respect to its row of hidden
