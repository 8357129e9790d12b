"""Triton kernels that add the contribution of the targets to dW.

    dW[y] += Σ_{t: y_t = y} c_t·hidden[t]

If dW is fp32, one pass adds the hidden rows, with at most 10 bytes of HBM traffic per element of
(C, H).

If dW is 16-bit, the product A = Eᵀ·scaled (scaled: the scaled hidden states) was rounded before the
hidden rows are added to it. This is harmless if the final sum S is at least as large as A. But if A
and the added rows nearly cancel, S is much smaller than A, and the rounding error of A is about
1e-2 of S. This happens to a token that is likely in all rows and often the target. Rows of dW with
|A| > |S|/4 are therefore recomputed from an fp32 product of their columns of E, and rounded once.
In all other rows, the rounding of A adds at most 3% to the rounding error of S. The kernel that
recomputes rows is always launched, so the host need not wait for the device. Its programs return
immediately if none of their rows must be recomputed.

The kernels use no atomics. If a target id occurs several times, only the program of its first
position writes the row of dW, and adds the hidden rows in order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from grpo_fast.kernels.gpu.launch import ceil_div, launch
from grpo_fast.kernels.gpu.linear import load_tile

# Threshold of |A|²/|S|² above which a row of dW is recomputed, because the rounding error of A is
# then a large part of S. A is the row before the hidden rows are added, and S is the row
# afterwards. The ratio is computed for each block of columns.
CANCELS = tl.constexpr(1 / 16)
# Number of hidden rows that a program adds per step, and maximum number of columns that it
# processes. An H100 starts a program about every 5 ns, so programs with fewer columns would take
# longer to start than to run.
SEGMENT_ROWS, SEGMENT_H = 4, 1024
# Maximum number of target ids that one launch sorts. It takes C² comparisons for C ids. torch.sort
# takes several launches.
COUNTED_ROWS = 8192
# Number of elements of a column of E that a program copies per step. Larger values spill registers:
# 1024 on sm_120 with Triton 3.9, and 512 on sm_80 with Triton 3.6.
COPIED = tl.constexpr(256)
# Tile sizes of the product: columns of E, columns of `hidden`, and rows of both per step.
BLOCK_U, BLOCK_H, BLOCK_T = 64, 64, 32


@triton.jit(do_not_specialize=["n_rows"])
def sort_kernel(
    target_ptr, id_ptr, order_ptr, n_rows, BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr
):
    """Sort target ids stably. The place of a row is the number of rows that come before it."""
    rows = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    ids = tl.load(target_ptr + rows, mask=rows < n_rows, other=0).to(tl.int32)
    place = tl.zeros([BLOCK_T], tl.int32)
    for start in range(0, n_rows, BLOCK_S):
        others = start + tl.arange(0, BLOCK_S)
        other_ids = tl.load(target_ptr + others, mask=others < n_rows, other=2**31 - 1)
        other_ids = other_ids.to(tl.int32)[None, :]
        is_before = other_ids < ids[:, None]
        is_before |= (other_ids == ids[:, None]) & (others[None, :] < rows[:, None])
        place += tl.sum(is_before.to(tl.int32), 1)
    tl.store(id_ptr + place, ids, mask=rows < n_rows)
    tl.store(order_ptr + place, rows.to(tl.int64), mask=rows < n_rows)


@triton.jit
def add_hidden_rows(
    total, place, vocab_row, id_ptr, order_ptr, by_target_ptr, hidden_ptr, n_slots,
    stride_hidden_t, cols, inside, ROWS: tl.constexpr,
):  # fmt: skip
    """Add by_target[t]·hidden[t] of all rows t of a target id to `total`, in order, and return it.

    `place` is the first position of the id among the sorted ids, where equal ids are adjacent.
    """
    first = place.to(tl.int32)
    while first >= 0:
        places = first + tl.arange(0, ROWS)
        is_same = tl.load(id_ptr + places, mask=places < n_slots, other=-1) == vocab_row
        row = tl.load(order_ptr + places, mask=is_same, other=0).to(tl.int64)
        by_target = tl.load(by_target_ptr + row, mask=is_same, other=0.0)
        mask = inside[None, :] & (by_target != 0.0)[:, None]
        at = hidden_ptr + row[:, None] * stride_hidden_t + cols[None, :]
        h = tl.load(at, mask=mask, other=0.0).to(tl.float32)
        total += tl.sum(tl.where(mask, h * by_target[:, None], 0.0), 0)
        first = tl.where(tl.min(is_same.to(tl.int32), 0) > 0, first + ROWS, -1)
    return total


@triton.jit(do_not_specialize=["n_slots", "n_rows"])
def add_targets_kernel(
    id_ptr, order_ptr, by_target_ptr, hidden_ptr, flag_ptr, matrix_ptr, columns_ptr, out_ptr,
    n_slots, n_rows, H, stride_hidden_t, stride_matrix_t, stride_out_v, ROWS: tl.constexpr,
    BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Add the hidden rows of one target id to its row of dW, for BLOCK_H columns.

    If `flag_ptr` is given, flag the row if it must be recomputed, and copy its column of `matrix`
    to a row of `columns`.
    """
    blocks = tl.cdiv(H, BLOCK_H)
    cols = tl.program_id(0) % blocks * BLOCK_H + tl.arange(0, BLOCK_H)
    inside = cols < H
    place = (tl.program_id(0) // blocks).to(tl.int64)
    vocab_row = tl.load(id_ptr + place).to(tl.int64)
    before = tl.load(id_ptr + place - 1, mask=place > 0, other=-1).to(tl.int64)
    cancels = tl.full([], 0, tl.int32)
    # Continue only at the first position of an id, so that exactly one program writes each block of
    # columns of a row.
    if before != vocab_row:
        # 1. Add the hidden rows to the row of dW.
        to = out_ptr + vocab_row * stride_out_v + cols
        start = tl.load(to, mask=inside, other=0.0).to(tl.float32)
        total = add_hidden_rows(
            start, place, vocab_row, id_ptr, order_ptr, by_target_ptr, hidden_ptr, n_slots,
            stride_hidden_t, cols, inside, ROWS,
        )  # fmt: skip
        tl.store(to, total.to(out_ptr.dtype.element_ty), mask=inside)
        if flag_ptr is not None:
            # 2. Flag the row if the product and the added rows nearly cancel.
            size = tl.sum(start * start, 0)
            cancels = (size > tl.sum(total * total, 0) * CANCELS).to(tl.int32)
            # If several blocks of a row copy its column, they write the same values.
            for row_start in range(0, tl.where(cancels > 0, n_rows, 0), COPIED):
                rows = row_start + tl.arange(0, COPIED)
                at = matrix_ptr + rows.to(tl.int64) * stride_matrix_t + vocab_row
                values = tl.load(at, mask=rows < n_rows, other=0.0)
                tl.store(columns_ptr + place * n_rows + rows, values, mask=rows < n_rows)
    if flag_ptr is not None:
        tl.store(flag_ptr + tl.program_id(0), cancels)


@triton.jit(do_not_specialize=["n_slots", "n_rows"])
def recompute_kernel(
    id_ptr, order_ptr, by_target_ptr, hidden_ptr, flag_ptr, columns_ptr, scaled_ptr, out_ptr,
    n_slots, n_rows, H, n_flags, stride_hidden_t, stride_out_v, ROWS: tl.constexpr,
    BLOCK_U: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Recompute the flagged rows of dW among BLOCK_U ids, for BLOCK_H columns.

    A row is the fp32 product of the copied column of E and the scaled hidden states, plus the
    hidden rows of its targets. An id is flagged if any of its `n_flags` flags is set, one for each
    block of columns of `add_targets_kernel`.
    """
    # 1. Find the flagged ids. Without any, skip the loops below.
    blocks = tl.cdiv(H, BLOCK_H)
    first_slot = tl.program_id(0) // blocks * BLOCK_U
    column = tl.program_id(0) % blocks * BLOCK_H
    offs_u = tl.arange(0, BLOCK_U)
    slots = (first_slot + offs_u).to(tl.int64)
    flagged = tl.zeros([BLOCK_U], tl.int32)
    for i in range(n_flags):
        flagged |= tl.load(flag_ptr + slots * n_flags + i, mask=slots < n_slots, other=0)
    has_flag = tl.max(flagged, 0) > 0
    # 2. Compute the product.
    total = tl.zeros([BLOCK_U, BLOCK_H], tl.float32)
    for start in tl.range(0, tl.where(has_flag, n_rows, 0), BLOCK_T):
        rows = start + tl.arange(0, BLOCK_T)
        mask = (flagged > 0)[:, None] & (rows < n_rows)[None, :]
        a = tl.load(columns_ptr + slots[:, None] * n_rows + rows[None, :], mask=mask, other=0.0)
        b = load_tile(scaled_ptr, start, n_rows, H, column, H, 1, BLOCK_T, BLOCK_H, False)
        total = tl.dot(a, b, total)
    # 3. Add the hidden rows of each flagged id, and write its row.
    cols = column + tl.arange(0, BLOCK_H)
    inside = cols < H
    for i in range(0, tl.where(has_flag, BLOCK_U, 0)):
        is_slot = offs_u == i
        if tl.sum(tl.where(is_slot, flagged, 0), 0) > 0:
            place = first_slot + i
            vocab_row = tl.load(id_ptr + place).to(tl.int64)
            row = add_hidden_rows(
                tl.sum(tl.where(is_slot[:, None], total, 0.0), 0), place, vocab_row, id_ptr,
                order_ptr, by_target_ptr, hidden_ptr, n_slots, stride_hidden_t, cols, inside, ROWS,
            )  # fmt: skip
            to = out_ptr + vocab_row * stride_out_v + cols
            tl.store(to, row.to(out_ptr.dtype.element_ty), mask=inside)


def sorted_targets(target_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Sort target ids (C,) stably, so that the rows of an id stay in order.

    Returns:
        The ids in ascending order, (C,) int32, and the row of each, (C,) int64.
    """
    count = target_ids.shape[0]
    if count > COUNTED_ROWS:
        # Sort int32, which takes a GPU half as long as int64.
        ids, order = target_ids.to(torch.int32).sort(stable=True)
        return ids, order
    ids = torch.empty(count, dtype=torch.int32, device=target_ids.device)
    order = torch.empty(count, dtype=torch.int64, device=target_ids.device)
    launch(
        sort_kernel, ceil_div(count, 32), target_ids, ids, order, count, BLOCK_T=32, BLOCK_S=256,
        num_warps=4,
    )  # fmt: skip
    return ids, order


def add_targets_(
    d_weight: Tensor,  # (V, H)
    ids: Tensor,  # (C,)
    order: Tensor,  # (C,)
    by_target: Tensor,  # (C,) fp32
    hidden: Tensor,  # (C, H)
    matrix: Tensor,  # (padded C, V)
    scaled: Tensor,  # (padded C, H)
) -> None:
    """Add by_target[t]·hidden[t] to the row of d_weight that belongs to the target of row t.

    The terms are added in fp32. Rows of a 16-bit d_weight that lose too many digits are recomputed,
    so the result is about as accurate as with an fp32 product.

    Args:
        d_weight: (V, H), modified in place. It contains the product matrixᵀ·scaled.
        ids: (C,) target ids in ascending order, int32 or int64.
        order: (C,) row of each target, ascending for equal ids.
        by_target: (C,) fp32 coefficients.
        hidden: (C, H).
        matrix: (padded C, V) exponentials.
        scaled: (padded C, H), contiguous.
    """
    count = ids.shape[0]
    rows, width = scaled.shape
    block_h = min(1 << (width - 1).bit_length(), SEGMENT_H)
    blocks = ceil_div(width, block_h)
    flags = columns = None
    # If d_weight is fp32, its values are not rounded yet, so it is enough to add the targets.
    is_rounded = d_weight.dtype.itemsize < 4
    if is_rounded:
        flags = torch.empty(count * blocks, dtype=torch.int32, device=ids.device)
        columns = torch.empty((count, rows), dtype=matrix.dtype, device=ids.device)
    launch(
        add_targets_kernel, count * blocks, ids, order, by_target, hidden, flags, matrix, columns,
        d_weight, count, rows, width, hidden.stride(0), matrix.stride(0), d_weight.stride(0),
        ROWS=SEGMENT_ROWS, BLOCK_H=block_h, num_warps=max(block_h // 256, 1),
    )  # fmt: skip
    if is_rounded:
        launch(
            recompute_kernel, ceil_div(count, BLOCK_U) * ceil_div(width, BLOCK_H), ids, order,
            by_target, hidden, flags, columns, scaled, d_weight, count, rows, width, blocks,
            hidden.stride(0), d_weight.stride(0), ROWS=SEGMENT_ROWS, BLOCK_U=BLOCK_U,
            BLOCK_H=BLOCK_H, BLOCK_T=BLOCK_T, num_warps=8, num_stages=2,
        )  # fmt: skip
