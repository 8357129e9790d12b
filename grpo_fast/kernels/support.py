"""Reference implementation of the LM head restricted to token sets, in plain torch.

The sets of all rows are stored one after another in vectors of length nnz.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from grpo_fast.kernels import reference
from grpo_fast.kernels.types import (
    HeadInputs,
    HeadRows,
    LogitRows,
    SupportRows,
    add_rows_,
    rows_of,
    scaled_rows,
)

# Maximum number of elements of `weight` or `hidden` that are copied at a time, to limit the memory.
BLOCK_ELEMENTS = 4 << 20


def target_places(
    ids: Tensor, offsets: Tensor, target_ids: Tensor, vocab_size: int
) -> tuple[Tensor, Tensor]:
    """Find the position of each target in its token set.

    Args:
        ids: (nnz,), int64 in [0, V).
        offsets: (R+1,), int64.
        target_ids: (R,), int64.
        vocab_size: V.

    Returns:
        A pair of int64 tensors. The first, (R,), is the position of each target in its set, or -1
        if the set does not contain the target. The second, 0-d, is an id that occurs twice in one
        set, or -1 if no id does.
    """
    rows = rows_of(offsets, len(ids))
    places = torch.arange(len(ids), device=ids.device) - offsets[rows]
    places = torch.where(ids == target_ids[rows], places, -1)
    of_targets = torch.full_like(target_ids, -1).scatter_reduce_(0, rows, places, "amax")
    # If an id occurs twice in a set, two keys are equal, and are neighbours after sorting.
    keys = (rows * vocab_size + ids).sort().values
    again = torch.where(keys[1:] == keys[:-1], keys[1:] % vocab_size, -1)
    return of_targets, torch.nn.functional.pad(again, (1, 0), value=-1).amax()


def head_rows(
    p: HeadInputs, rows: SupportRows, *, return_entropy: bool, return_slopes: bool
) -> HeadRows:
    """Compute the logits of all ids in the sets, and the statistics of every row.

    All results are at least fp32. The target ids are the positions of the targets in their sets.
    With `return_slopes`, also compute the slopes, the derivatives of the logps with respect to the
    hidden states.
    """
    # 1. Compute the logits block by block.
    hidden, weight, bias, places, transform, _ = p
    dtype = torch.promote_types(weight.dtype, torch.float32)
    raw = weight.new_empty(len(rows.ids), dtype=dtype)
    sources = rows.hidden_rows
    for block in _id_blocks(len(raw), weight):
        h = hidden[sources[block]].to(dtype)
        w = weight[rows.ids[block]].to(dtype)
        # Use a batched dot product, which gives a row the same bits in every block.
        raw[block] = (h[:, None, :] @ w[:, :, None])[:, 0, 0]
    if bias is not None:
        raw += bias[rows.ids].to(dtype)
    # 2. Compute the statistics and the slopes.
    logits = LogitRows(raw[None], places, transform, rows.offsets)
    stats = reference.row_logps(logits, return_entropy=return_entropy)
    slopes = None
    if return_slopes:
        # Pass a copy of `raw`, because `raw` is returned and row_grad_ overwrites its input.
        logits = logits._replace(logits=raw[None].clone())
        d = reference.row_grad_(logits, stats, torch.ones_like(stats[1]), None)
        slopes = head_hidden(d[0], weight, rows)
    return HeadRows(raw, stats, slopes)


def head_hidden(d: Tensor, weight: Tensor, rows: SupportRows) -> Tensor:
    """Return the sum of d·weight[id] over the ids of each row, (R, H) in the dtype of d.

    Ids with d = 0 contribute nothing, even if their weight row contains NaN.
    """
    sums = d.new_zeros((len(rows.places), weight.shape[1]))
    _add_terms_(sums, rows.rows, d, weight, rows.ids)
    return sums


def head_weight(d: Tensor, hidden: Tensor, rows: SupportRows, out: Tensor, *, add: bool) -> None:
    """For each id, compute out[id] as the sum of d·hidden over all occurrences of the id.

    `d` is (nnz,), `hidden` is (N, H) and `out` is (V, H). The terms are added in row order. The
    sums overwrite `out`, or are added to it if `add` is set.
    """
    sums = out.to(d.dtype) if add else out.new_zeros(out.shape, dtype=d.dtype)
    _add_terms_(sums, rows.ids, d, hidden, rows.hidden_rows)
    if sums is not out:  # round a 16-bit dW once, after the sum
        out.copy_(sums)


def _add_terms_(sums: Tensor, to: Tensor, d: Tensor, matrix: Tensor, index: Tensor) -> None:
    """Add d[i]·matrix[index[i]] to sums[to[i]] for every i, in order. Terms with d = 0 are 0."""
    for block in _id_blocks(len(d), matrix):
        terms = scaled_rows(matrix[index[block]].to(d.dtype), d[block])
        add_rows_(sums, to[block], terms)


def _id_blocks(count: int, like: Tensor) -> Iterator[slice]:
    step = max(BLOCK_ELEMENTS // like.shape[1], 1)
    for start in range(0, count, step):
        yield slice(start, start + step)
