"""A caller's `Support` as rows for the kernels: its values checked, what does not count gone."""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_fast.kernels.support import Support, SupportRows
from grpo_fast.loss import values
from grpo_fast.loss.pending import check_values, told_late


def support_rows(
    support: Support,
    kept: Tensor | None,  # (T,) int64: the active ones of the caller's targets; None: all
    target_ids: Tensor,  # (T,) int64 of the active ones
    vocab_size: int,
    validate: str,
) -> SupportRows | None:
    """The active rows that have a set, in memory of their own; None where none has.

    On a GPU the host waits once, for how many rows and ids there are.

    Raises:
        ValueError: naming the argument, what was expected and what came.
    """
    count = len(support.ids)
    offsets = values.offsets(support.offsets, count, validate, "support.offsets", "nnz")
    starts, lengths = offsets[:-1], offsets.diff()
    if kept is not None:
        starts, lengths = starts[kept], lengths[kept]
    num_rows, num_ids = _sizes(lengths)
    if not num_rows:
        return None
    index, others = None, None
    if num_rows < len(lengths):
        index, others = (
            torch.nonzero_static(x, size=size)[:, 0]
            for x, size in ((lengths > 0, num_rows), (lengths == 0, len(lengths) - num_rows))
        )
        starts, lengths, target_ids = (x[index] for x in (starts, lengths, target_ids))
    own = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    places = torch.arange(num_ids, device=own.device)
    rows = torch.searchsorted(own[1:], places, right=True)
    places -= own[rows]  # of each id in its row, from 0
    ids = support.ids[starts[rows] + places].long()
    expected = f"ids in [0, {vocab_size}) in the rows of the active tokens"
    ids = values.ids("support.ids", ids, vocab_size, validate, expected=expected)
    found = SupportRows(
        index, others, ids, own, rows,
        _target_places(ids, rows, places, target_ids, validate),
    )  # fmt: skip
    _refuse_duplicates(found, vocab_size, validate)
    return found


def _sizes(lengths: Tensor) -> tuple[int, int]:
    """How many rows have a set, and how many ids these have."""
    num_rows, num_ids = torch.stack([(lengths > 0).sum(), lengths.sum()]).tolist()
    return num_rows, num_ids


def _target_places(
    ids: Tensor, rows: Tensor, places: Tensor, target_ids: Tensor, validate: str
) -> Tensor:
    """(R,): where each row's target stands in it."""
    at = torch.where(ids == target_ids[rows], places, -1)
    found = torch.full_like(target_ids, -1).scatter_reduce_(0, rows, at, "amax")
    missing = found < 0
    message = "support: expected every active target among its own ids"
    flag = missing.any()
    if flag.device.type == "cpu" and flag:
        first = int(target_ids[missing][0])
        message += f", got {int(missing.sum())} that are not, the first of them target id {first}"
    check_values([(flag, message)], validate)
    return found.clamp(min=0) if told_late(found, validate) else found


def _refuse_duplicates(rows: SupportRows, vocab_size: int, validate: str) -> None:
    keys = (rows.rows * vocab_size + rows.ids).sort().values
    again = keys[1:] == keys[:-1]
    message = "support.ids: expected no id twice in one row"
    flag = again.any()
    if flag.device.type == "cpu" and flag:
        first = int(keys[1:][again][0])
        message += (
            f", got {int(again.sum())} repetitions, the first of them of id {first % vocab_size}"
        )
    check_values([(flag, message)], validate)
