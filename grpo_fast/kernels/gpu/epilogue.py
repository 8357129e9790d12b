"""Epilogue of the LM head GEMM, which computes online softmax statistics of a tile in registers.

It can also store the tile. A tile is processed from left to right, in pieces with a fixed number of
columns. Only one piece at a time needs extra registers, so a tile of 128 x 256 does not spill. The
fixed number of columns makes the order of the sums independent of the tile size.
"""

from __future__ import annotations

import triton
import triton.language as tl

from grpo_fast.kernels.gpu.math import FLOOR, capped_logits, exp_fp32


@triton.jit
def store_tile(
    out, values, row_start, n_rows, start, V, stride_out_t,
    USE_TMA: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Store (ROWS, COLS) values at position (row_start, start) of `out`, clipped to (n_rows, V)."""
    if USE_TMA:
        out.store([row_start, start], values.to(out.dtype))
    else:
        offs_r, offs_c = tl.arange(0, ROWS), tl.arange(0, COLS)
        corner = out + tl.cast(row_start, tl.int64) * stride_out_t + start
        inside = (offs_r < n_rows - row_start)[:, None] & (offs_c < V - start)[None, :]
        offsets = offs_r[:, None] * stride_out_t + offs_c[None, :]
        tl.store(corner + offsets, values.to(out.dtype.element_ty), mask=inside)


@triton.jit
def fold(
    raw, start, sums, row, matrix, out, bias_ptr, logit_scale, softcap,
    STORE: tl.constexpr, ENTROPY: tl.constexpr, STORE_TMA: tl.constexpr, CLEAN: tl.constexpr,
    BLOCK_T: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Add COLS columns of logits to the running sums of their rows.

    With STORE = "logits" or "exponentials", the logits or their exponentials are also stored.
    `sums` contains the running sums (row_max, exp_sum, exp_z_sum, z_target), and the updated sums
    are returned. The caller sets CLEAN if all columns are inside the vocabulary and none of them is
    a target. The function then skips the masks for both cases. The results are bitwise identical.
    """
    row_max, exp_sum, exp_z_sum, z_target = sums
    target, normaliser, inv_temperature = row
    row_start, n_rows, V, stride_out_t = matrix
    # 1. Add the bias, store the raw logits if requested, and apply the logit transform.
    cols = start + tl.arange(0, COLS)
    if bias_ptr is not None:
        raw += tl.load(bias_ptr + cols, mask=cols < V, other=0.0).to(tl.float32)[None, :]
    if STORE == "logits":
        store_tile(out, raw, row_start, n_rows, start, V, stride_out_t, STORE_TMA, BLOCK_T, COLS)
    z, tanh_slope = capped_logits(raw, logit_scale, softcap, inv_temperature)
    # 2. Exclude the target's column from the sums. 1 - p of the target then follows from the sums
    # without cancellation, even if p is close to 1.
    if not CLEAN:
        is_target = cols[None, :] == target[:, None]
        z_target += tl.sum(tl.where(is_target, z, 0.0), 1)
        z = tl.where((cols < V)[None, :] & ~is_target, z, float("-inf"))
    # 3. Update the online softmax: rescale the running sums to the new maximum and add the columns.
    new_max = tl.maximum(row_max, tl.max(z, 1))
    rescale = exp_fp32(row_max - new_max)
    shifted = z - new_max[:, None]
    e = exp_fp32(shifted)
    if ENTROPY:
        # Accumulate Σ e·(z - max). Computing the entropy from Σ e·z would subtract two numbers as
        # large as the logits, and lose digits. FLOOR prevents the NaN of 0·(-inf).
        exp_z_sum = (exp_z_sum + (row_max - new_max) * exp_sum) * rescale + tl.sum(
            e * tl.maximum(shifted, FLOOR), 1
        )
    exp_sum = exp_sum * rescale + tl.sum(e, 1)
    if STORE == "exponentials":
        # 4. Make the exponentials relative to the row's `normaliser` instead of the running
        # maximum, and store them. Without a soft cap, tanh_slope is the constant 1, so that the
        # compiler removes its product.
        e *= exp_fp32(new_max - normaliser)[:, None]
        e *= tanh_slope
        # tl.maximum also replaces NaN with 0. A NaN in a row with coefficient 0 would make all of
        # dW NaN, because 0·NaN is NaN.
        e = tl.maximum(e, 0.0)
        store_tile(out, e, row_start, n_rows, start, V, stride_out_t, STORE_TMA, BLOCK_T, COLS)
    return new_max, exp_sum, exp_z_sum, z_target


@triton.jit
def fold_parts(
    raw, start, sums, row, matrix, out, bias_ptr, logit_scale, softcap,
    STORE: tl.constexpr, ENTROPY: tl.constexpr, STORE_TMA: tl.constexpr, CLEAN: tl.constexpr,
    BLOCK_T: tl.constexpr, COLS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Apply `fold` to the pieces of a tile from left to right. PARTS is 1, 2 or 4."""
    if PARTS == 1:
        sums = fold(
            raw, start, sums, row, matrix, out, bias_ptr, logit_scale, softcap, STORE, ENTROPY,
            STORE_TMA, CLEAN, BLOCK_T, COLS,
        )  # fmt: skip
    else:
        # Split the tile into its left and right halves.
        halves = tl.split(tl.permute(tl.reshape(raw, [BLOCK_T, 2, COLS // 2]), [0, 2, 1]))
        for side in tl.static_range(2):
            sums = fold_parts(
                halves[side], start + side * (COLS // 2), sums, row, matrix, out, bias_ptr,
                logit_scale, softcap, STORE, ENTROPY, STORE_TMA, CLEAN, BLOCK_T, COLS // 2,
                PARTS // 2,
            )  # fmt: skip
    return sums


@triton.jit
def fold_tile(
    raw, start, sums, row, matrix, out, bias_ptr, logit_scale, softcap,
    STORE: tl.constexpr, ENTROPY: tl.constexpr, STORE_TMA: tl.constexpr, BRANCH: tl.constexpr,
    BLOCK_T: tl.constexpr, COLS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Apply `fold` to a tile. With BRANCH, a tile without targets uses a shorter code path.

    The shorter path needs 8 instead of 17 instructions per logit. At V = 151936, four of five 128 x
    256 tiles contain no target. The caller does not set BRANCH with an entropy, a bias, a soft cap
    or fp32 operands, because the two code paths would then need too many registers. A branch also
    prevents Triton from warp-specialising the loop.
    """
    needs_masks = True
    if BRANCH:
        target, _, _ = row
        _, _, V, _ = matrix
        # The condition is the same for all threads of the program, so no warp diverges.
        is_here = (target >= start) & (target < start + COLS)
        needs_masks = (tl.max(is_here.to(tl.int32), 0) > 0) | (start + COLS > V)
    if needs_masks:
        sums = fold_parts(
            raw, start, sums, row, matrix, out, bias_ptr, logit_scale, softcap, STORE, ENTROPY,
            STORE_TMA, False, BLOCK_T, COLS, PARTS,
        )  # fmt: skip
    else:
        sums = fold_parts(
            raw, start, sums, row, matrix, out, bias_ptr, logit_scale, softcap, STORE, ENTROPY,
            STORE_TMA, True, BLOCK_T, COLS, PARTS,
        )  # fmt: skip
    return sums
