"""The epilogue of the hidden -> logps kernel: statistics of a tile of logits in registers, and its
store.

The tile is taken in pieces of a fixed number of columns, from left to right. Only a piece then
needs registers beside the tile itself (a tile of 128 x 256 spills otherwise), and the order of the
sums does not depend on the tile.
"""

from __future__ import annotations

import triton
import triton.language as tl

from grpo_fast.kernels.gpu.math import FLOOR, capped_logits, exp_fp32


@triton.jit
def halves(tile, ROWS: tl.constexpr, COLS: tl.constexpr):
    """The left and the right half of the columns."""
    return tl.split(tl.permute(tl.reshape(tile, [ROWS, 2, COLS // 2]), [0, 2, 1]))


@triton.jit
def store_tile(
    out, values, row_start, n_rows, start, V, stride_out_t,
    USE_TMA: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """values (ROWS, COLS) at (row_start, start) of out, clipped to (n_rows, V)."""
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
    """Take COLS columns of logits into the running sums of their rows, and store what was asked
    for.

    CLEAN: no target of any row is among the columns and all of them lie in the vocabulary; the bits
        are the same.
    """
    row_max, exp_sum, exp_z_sum, z_target = sums
    target, normaliser, inv_temperature = row
    row_start, n_rows, V, stride_out_t = matrix
    cols = start + tl.arange(0, COLS)
    if bias_ptr is not None:
        raw += tl.load(bias_ptr + cols, mask=cols < V, other=0.0).to(tl.float32)[None, :]
    if STORE == "logits":
        store_tile(out, raw, row_start, n_rows, start, V, stride_out_t, STORE_TMA, BLOCK_T, COLS)
    z, tanh_slope = capped_logits(raw, logit_scale, softcap, inv_temperature)
    if not CLEAN:
        is_target = cols[None, :] == target[:, None]
        z_target += tl.sum(tl.where(is_target, z, 0.0), 1)
        z = tl.where((cols < V)[None, :] & ~is_target, z, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(z, 1))
    rescale = exp_fp32(row_max - new_max)
    shifted = z - new_max[:, None]
    e = exp_fp32(shifted)
    if ENTROPY:
        # Σ e·(z - max), not Σ e·z: the entropy is then no difference of two numbers of the size of
        # the logits.
        exp_z_sum = (exp_z_sum + (row_max - new_max) * exp_sum) * rescale + tl.sum(
            e * tl.maximum(shifted, FLOOR), 1
        )
    exp_sum = exp_sum * rescale + tl.sum(e, 1)
    if STORE == "exponentials":
        e *= exp_fp32(new_max - normaliser)[:, None]
        if softcap is not None:
            e *= tanh_slope
        # The maximum makes a NaN 0: what a row without coefficient stores must be finite, whatever
        # the row holds.
        e = tl.maximum(e, 0.0)
        store_tile(out, e, row_start, n_rows, start, V, stride_out_t, STORE_TMA, BLOCK_T, COLS)
    return new_max, exp_sum, exp_z_sum, z_target


@triton.jit
def fold_parts(
    raw, start, sums, row, matrix, out, bias_ptr, logit_scale, softcap,
    STORE: tl.constexpr, ENTROPY: tl.constexpr, STORE_TMA: tl.constexpr, CLEAN: tl.constexpr,
    BLOCK_T: tl.constexpr, COLS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """`fold` in PARTS (1, 2 or 4) pieces from left to right: registers for one piece at a time."""
    if PARTS == 1:
        sums = fold(
            raw, start, sums, row, matrix, out, bias_ptr, logit_scale, softcap, STORE, ENTROPY,
            STORE_TMA, CLEAN, BLOCK_T, COLS,
        )  # fmt: skip
    else:
        left, right = halves(raw, BLOCK_T, COLS)
        sums = fold_parts(
            left, start, sums, row, matrix, out, bias_ptr, logit_scale, softcap, STORE, ENTROPY,
            STORE_TMA, CLEAN, BLOCK_T, COLS // 2, PARTS // 2,
        )  # fmt: skip
        sums = fold_parts(
            right, start + COLS // 2, sums, row, matrix, out, bias_ptr, logit_scale, softcap, STORE,
            ENTROPY, STORE_TMA, CLEAN, BLOCK_T, COLS // 2, PARTS // 2,
        )  # fmt: skip
    return sums


@triton.jit
def fold_tile(
    raw, start, sums, row, matrix, out, bias_ptr, logit_scale, softcap,
    STORE: tl.constexpr, ENTROPY: tl.constexpr, STORE_TMA: tl.constexpr, BRANCH: tl.constexpr,
    BLOCK_T: tl.constexpr, COLS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """`fold` of a whole tile; with BRANCH one without a target takes 8 instead of 17 instructions
    per logit.

    Four of five tiles of 128 x 256 are such ones at V = 151936. (A loop with a branch is not warp
    specialised; with entropy, bias, a soft cap or fp32 operands the branch costs registers that
    some architectures do not have.)
    """
    if BRANCH:
        target, _, _ = row
        _, _, V, _ = matrix
        is_here = (target >= start) & (target < start + COLS)
        if (tl.max(is_here.to(tl.int32), 0) > 0) | (start + COLS > V):
            sums = fold_parts(
                raw, start, sums, row, matrix, out, bias_ptr, logit_scale, softcap, STORE, ENTROPY,
                STORE_TMA, False, BLOCK_T, COLS, PARTS,
            )  # fmt: skip
        else:
            sums = fold_parts(
                raw, start, sums, row, matrix, out, bias_ptr, logit_scale, softcap, STORE, ENTROPY,
                STORE_TMA, True, BLOCK_T, COLS, PARTS,
            )  # fmt: skip
    else:
        sums = fold_parts(
            raw, start, sums, row, matrix, out, bias_ptr, logit_scale, softcap, STORE, ENTROPY,
            STORE_TMA, False, BLOCK_T, COLS, PARTS,
        )  # fmt: skip
    return sums
