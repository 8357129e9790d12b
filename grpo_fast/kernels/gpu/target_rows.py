"""Triton kernels that add the contribution of the targets to dW.

    dW[y] += Σ_{t: y_t = y} c_t·hidden[t]

If dW is fp32, one pass adds the hidden rows, with at most 10 bytes of HBM traffic per element of
(C, H).

If dW is 16-bit, the product A = Eᵀ·scaled (scaled: the scaled hidden states) was rounded before the
hidden rows are added to it. This is harmless if the final sum S is at least as large as A. But if A
and the added rows nearly cancel, S is much smaller than A, and the rounding error of A is about
1e-2 of S. This happens to a token that is likely in all rows and often the target. Rows of dW with
|A| > |S|/4 are therefore recomputed from an fp32 product of their columns of E, and rounded once.
In all other rows, the rounding of A adds at most 3% to the rounding error of S. The kernels that
recompute rows are always launched, so the host need not wait for the device. If a row need not be
recomputed, its programs return immediately.

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
# For each block of columns, at most this many programs write the recomputed rows. If there are more
# ids, each program processes several of them, because most ids have no recomputed row.
REPLACING = 256
# Number of elements of a column of E that a program copies per step. With 1024, Triton 3.9 spills
# registers on sm_120, and with 512, Triton 3.6 on sm_80.
COPIED = tl.constexpr(256)
# Tile sizes of the product: columns of E, columns of `hidden`, and rows of both per step.
BLOCK_U, BLOCK_H, BLOCK_T = 64, 64, 32


@triton.jit(do_not_specialize=["n_slots", "n_rows"])
def add_targets_kernel(
    id_ptr, order_ptr, by_target_ptr, hidden_ptr, place_ptr, product_ptr, flag_ptr, matrix_ptr,
    columns_ptr, out_ptr, n_slots, n_rows, H, stride_hidden_t, stride_matrix_t, stride_out_v,
    ROWS: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """For each id, add the hidden rows of its targets to its row of dW, for BLOCK_H columns.

    If `place_ptr` is given, it lists positions in the sorted target ids, and only the ids at these
    positions are processed. Unused entries are -1. If `flag_ptr` is given, rows of dW that must be
    recomputed are flagged, and their columns of `matrix` are copied to rows of `columns`.
    """
    # 1. Select the ids and the columns of this program.
    blocks = tl.cdiv(H, BLOCK_H)
    cols = tl.program_id(0) % blocks * BLOCK_H + tl.arange(0, BLOCK_H)
    inside = cols < H
    for slot in range(tl.program_id(0) // blocks, n_slots, tl.num_programs(0) // blocks):
        place = tl.cast(slot, tl.int64)
        if place_ptr is not None:
            place = tl.load(place_ptr + slot)
        vocab_row = tl.load(id_ptr + place, mask=place >= 0, other=-1).to(tl.int64)
        before = tl.load(id_ptr + place - 1, mask=place > 0, other=-1).to(tl.int64)
        cancels = tl.full([], 0, tl.int32)
        # Continue only if `place` is the first occurrence of its id, so that exactly one program
        # writes each row.
        if before != vocab_row:
            # 2. Start from the row of dW, or from the recomputed fp32 product.
            to = out_ptr + vocab_row * stride_out_v + cols
            if product_ptr is None:
                start = tl.load(to, mask=inside, other=0.0).to(tl.float32)
            else:
                product = product_ptr + tl.cast(slot, tl.int64) * H + cols
                start = tl.load(product, mask=inside, other=0.0)
            total = start
            # 3. Add the hidden rows of this id in order. They are adjacent, because ids are sorted.
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
            tl.store(to, total.to(out_ptr.dtype.element_ty), mask=inside)
            if flag_ptr is not None:
                # 4. Flag the row if the product and the added rows nearly cancel.
                size = tl.sum(start * start, 0)
                cancels = (size > tl.sum(total * total, 0) * CANCELS).to(tl.int32)
                # If several blocks of a row copy its column, they write the same values.
                for row_start in range(0, tl.where(cancels > 0, n_rows, 0), COPIED):
                    rows = row_start + tl.arange(0, COPIED)
                    at = matrix_ptr + rows.to(tl.int64) * stride_matrix_t + vocab_row
                    values = tl.load(at, mask=rows < n_rows, other=0.0)
                    tl.store(columns_ptr + place * n_rows + rows, values, mask=rows < n_rows)
        if flag_ptr is not None:
            tl.store(flag_ptr + slot * blocks + tl.program_id(0) % blocks, cancels)


@triton.jit(do_not_specialize=["n_rows", "n_slots"])
def column_product_kernel(
    columns_ptr, scaled_ptr, place_ptr, product_ptr, n_slots, n_rows, H, BLOCK_U: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Compute the fp32 product of copied columns of E and the scaled hidden states.

    The result is product[slot] = Σ_t columns[place, t]·scaled[t], where `place_ptr` has the place
    of each slot. An unused slot has the place -1.
    """
    blocks = tl.cdiv(H, BLOCK_H)
    first, column = tl.program_id(0) // blocks * BLOCK_U, tl.program_id(0) % blocks * BLOCK_H
    slots, cols = first + tl.arange(0, BLOCK_U), column + tl.arange(0, BLOCK_H)
    places = tl.load(place_ptr + slots, mask=slots < n_slots, other=-1)
    # Skip the loop if all slots of this program are unused.
    depth = tl.where(tl.max(places, 0) >= 0, n_rows, 0)
    total = tl.zeros([BLOCK_U, BLOCK_H], tl.float32)
    at = columns_ptr + places.to(tl.int64)[:, None] * n_rows
    for start in tl.range(0, depth, BLOCK_T):
        rows = start + tl.arange(0, BLOCK_T)
        mask = (places >= 0)[:, None] & (rows < n_rows)[None, :]
        a = tl.load(at + rows[None, :], mask=mask, other=0.0)
        b = load_tile(scaled_ptr, start, n_rows, H, column, H, 1, BLOCK_T, BLOCK_H, False)
        total = tl.dot(a, b, total)
    to = product_ptr + slots.to(tl.int64)[:, None] * H + cols[None, :]
    tl.store(to, total, mask=(places >= 0)[:, None] & (cols < H)[None, :])


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
    count, (rows, width) = ids.shape[0], scaled.shape
    block_h = min(1 << (width - 1).bit_length(), SEGMENT_H)
    blocks, device = ceil_div(width, block_h), ids.device

    def add(
        places: Tensor | None = None, products: Tensor | None = None,
        flags: Tensor | None = None, columns: Tensor | None = None,
    ) -> None:  # fmt: skip
        programs = (count if places is None else min(count, REPLACING)) * blocks
        launch(
            add_targets_kernel, programs, ids, order, by_target, hidden, places, products, flags,
            matrix, columns, d_weight, count, rows, width, hidden.stride(0), matrix.stride(0),
            d_weight.stride(0), ROWS=SEGMENT_ROWS, BLOCK_H=block_h,
            num_warps=max(block_h // 256, 1),
        )  # fmt: skip

    # 1. If d_weight is fp32, its values are not rounded yet, so it is enough to add the targets.
    if d_weight.dtype.itemsize >= 4:
        add()
        return
    # 2. If d_weight is 16-bit, add the targets, and flag the rows in which the product and the
    # added rows nearly cancel.
    flags = torch.empty((count, blocks), dtype=torch.int32, device=device)
    columns = torch.empty((count, rows), dtype=matrix.dtype, device=device)
    add(flags=flags, columns=columns)
    # 3. Compute the fp32 product of the flagged rows, and add the targets to it. nonzero_static
    # does not synchronise, because its size is fixed. Unused entries are -1.
    is_flagged = flags.view(-1) if blocks == 1 else flags.any(1)
    places = torch.nonzero_static(is_flagged, size=count).view(-1)
    products = torch.empty((count, width), dtype=torch.float32, device=device)
    launch(
        column_product_kernel, ceil_div(count, BLOCK_U) * ceil_div(width, BLOCK_H), columns,
        scaled, places, products, count, rows, width, BLOCK_U=BLOCK_U, BLOCK_H=BLOCK_H,
        BLOCK_T=BLOCK_T, num_warps=8, num_stages=2,
    )  # fmt: skip
    add(places, products)
