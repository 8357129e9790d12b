"""A caller's `Support` as rows for the kernels: its values checked, what does not count gone."""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_fast.kernels.route import support_doors
from grpo_fast.kernels.support import Support, SupportRows, rows_of
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

    On a GPU the host learns here how many rows and ids there are: one copy that it waits for.

    Raises:
        ValueError: naming the argument, what was expected and what came.
    """
    count = len(support.ids)
    offsets = values.offsets(support.offsets, count, validate, "support.offsets", "nnz")
    starts, lengths = offsets[:-1], offsets.diff()
    if kept is not None:
        starts, lengths = starts[kept], lengths[kept]
    has_set = lengths > 0
    count, total = _sizes(has_set, lengths)
    if count == 0:
        return None
    own = others = None
    if count < len(lengths):
        own, others = (
            torch.nonzero_static(x, size=n)[:, 0]
            for x, n in ((has_set, count), (~has_set, len(lengths) - count))
        )
        starts, lengths, target_ids = (x[own] for x in (starts, lengths, target_ids))
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    ids = support.ids.to(torch.int64, copy=True)
    if total < len(ids):  # what lies between the sets of the active rows is not looked at
        rows = rows_of(offsets, total)
        ids = ids[starts[rows] - offsets[rows] + torch.arange(total, device=ids.device)]
    expected = f"ids in [0, {vocab_size}) in the rows of the active tokens"
    ids = values.ids("support.ids", ids, vocab_size, validate, expected=expected)
    doors = support_doors("cpu" if ids.is_cpu else "torch")
    places, repeated = doors.target_places(ids, offsets, target_ids, vocab_size)
    _check(target_ids, places, repeated, validate)
    if told_late(places, validate):
        places = places.clamp(min=0)
    return SupportRows(own, others, ids, offsets, places)


def _sizes(has_set: Tensor, lengths: Tensor) -> tuple[int, int]:
    """How many rows have a set, and how many ids these have."""
    count, total = torch.stack([has_set.sum(), lengths.sum()]).tolist()
    return count, total


def _check(target_ids: Tensor, places: Tensor, repeated: Tensor, validate: str) -> None:
    """Every target in its row, and no id twice in one."""
    missing, twice = (places < 0).any(), repeated >= 0
    one = "support: expected every active target among its own ids"
    other = "support.ids: expected no id twice in one row"
    if missing.device.type == "cpu" and missing:
        count, first = int((places < 0).sum()), int(target_ids[places < 0][0])
        one += f", got {count} that are not, the first of them target id {first}"
    if twice.device.type == "cpu" and twice:
        other += f", got id {int(repeated)} twice"
    check_values([(missing, one), (twice, other)], validate)
