"""Conversion of a `Support` into rows for the kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_fast.kernels.route import kernel_module
from grpo_fast.kernels.support import Support, SupportRows, rows_of
from grpo_fast.loss.value_checks import ValueChecks
from grpo_fast.loss.values import checked_ids, checked_offsets


def support_rows(
    support: Support,
    active_index: Tensor | None,  # (T,) int64, None: all
    target_ids: Tensor,  # (T,) int64
    vocab_size: int,
    checks: ValueChecks,
) -> SupportRows | None:
    """Convert a `Support` to the form that the kernels expect.

    Rows with an empty set use the full vocabulary. If all active rows have an empty set, the result
    is None. The host must know the total size of all sets, which costs a GPU sync.

    Args:
        support: one set of ids for each target of the caller.
        active_index: (T,), int64. Positions of the active targets. None if all targets are active.
        target_ids: (T,), int64. The active targets.
        vocab_size: V.
        checks: the checks of the call.
    """
    # 1. Find the start and the size of the set of each active row.
    count = len(support.ids)
    bounds = checked_offsets(support.offsets, count, checks, "support.offsets", "nnz")
    starts = bounds[:-1]
    lengths = bounds.diff()
    if active_index is not None:
        starts = starts[active_index]
        lengths = lengths[active_index]
    # 2. Separate the rows without a set, which use the full vocabulary.
    has_set = lengths > 0
    count, total = _sizes(has_set, lengths)
    if count == 0:
        return None
    own_rows = other_rows = None
    if count < len(lengths):
        # Use nonzero_static() with the known number of sets. nonzero() would cost a second sync.
        own_rows = torch.nonzero_static(has_set, size=count)[:, 0]
        other_rows = torch.nonzero_static(~has_set, size=len(lengths) - count)[:, 0]
        starts = starts[own_rows]
        lengths = lengths[own_rows]
        target_ids = target_ids[own_rows]
    # 3. Copy the ids of the remaining rows into one vector.
    bounds = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    columns = support.ids.long()
    if total < len(columns):  # skip the sets of inactive rows
        rows = rows_of(bounds, total)
        places = starts[rows] - bounds[rows] + torch.arange(total, device=columns.device)
        columns = columns[places]
    expected = f"ids in [0, {vocab_size}) in the rows of the active tokens"
    columns = checked_ids("support.ids", columns, vocab_size, checks, expected=expected)
    # 4. Find the position of each target in its set.
    target_places = kernel_module("support", "cpu" if columns.is_cpu else "torch").target_places
    places, repeated = target_places(columns, bounds, target_ids, vocab_size)
    _check_targets(target_ids, places, repeated, checks)
    if checks.are_late(places):
        places = places.clamp(min=0)
    return SupportRows(own_rows, other_rows, columns, bounds, places)


def _sizes(has_set: Tensor, lengths: Tensor) -> tuple[int, int]:
    """Return the number of rows with a set, and the total size of all sets.

    benchmarks/gpu/recorder.py replaces this function, because fake tensors have no values.
    """
    # Copy both numbers to the host in one transfer, because each transfer costs a GPU sync.
    count, total = torch.stack([has_set.sum(), lengths.sum()]).tolist()
    return count, total


def _check_targets(ids: Tensor, places: Tensor, repeated: Tensor, checks: ValueChecks) -> None:
    missing = places < 0
    absent = "support: expected every active target among the ids of its set"
    if places.is_cpu and missing.any():
        first = int(ids[missing][0])
        absent += f", got {int(missing.sum())} that are not, the first of them target id {first}"
    checks.add_flag(missing.any(), absent)
    twice = "support.ids: expected no id twice in one row, got id"
    checks.add(lambda number: "" if number < 0 else f"{twice} {number} twice", repeated)
