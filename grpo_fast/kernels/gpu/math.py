"""Triton functions that several kernels share, and the epilogue of the LM head's GEMM.

The shared functions are accurate elementary functions, the logit transform, the last step of a
softmax (`finish`) and the coefficients of stored exponentials. Kernels that share a function
compute the same bits for a row.

The epilogue (`fold_tile`) computes the statistics of a tile in registers, and can also store the
tile. A tile is processed from left to right, in pieces with a fixed number of columns. Only one
piece at a time needs extra registers, so a tile of 128 x 256 does not spill. The fixed number of
columns makes the order of the sums independent of the tile size.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
# Initial value of the running maximum. If it were -inf, a first block with only -inf columns would
# compute -inf - (-inf) = NaN. FLOOR is less than every meaningful logit. It is greater than -3e38,
# a value often used to mask columns, so such columns still get a probability of 0.
FLOOR = tl.constexpr(-1.0e30)


@triton.jit
def exp_fp32(x):
    return tl.exp2(x * LOG2E)


@triton.jit
def expm1_minus(x):
    """Return e^x - 1 - x.

    The direct formula is inaccurate for |x| < 1, so use the series x²/2·(1 + x/3·(1 + …)) there.
    """
    # Where the other branch is chosen, evaluate the series at 0, so that it cannot overflow.
    s = tl.where(tl.abs(x) < 1.0, x, 0.0)
    tail = 1.0 + s / 9.0 * (1.0 + s / 10.0 * (1.0 + s / 11.0 * (1.0 + s / 12.0)))
    tail = 1.0 + s / 5.0 * (1.0 + s / 6.0 * (1.0 + s / 7.0 * (1.0 + s / 8.0 * tail)))
    series = s * s * 0.5 * (1.0 + s / 3.0 * (1.0 + s / 4.0 * tail))
    return tl.where(tl.abs(x) < 1.0, series, exp_fp32(x) - 1.0 - x)


@triton.jit
def expm1(x):
    """Return e^x - 1 without cancellation for small x."""
    return tl.where(tl.abs(x) < 1.0, x + expm1_minus(x), exp_fp32(x) - 1.0)


@triton.jit
def log1p(x):
    """Return log(1 + x) for x > -1, with full precision for small x."""
    # The factor x/(u - 1) corrects the rounding error of u = 1 + x. If u rounds to 1, the result is
    # x, which equals log(1 + x) in fp32.
    u = 1.0 + x
    return tl.where(u == 1.0, x, tl.log(u) * (x / tl.where(u == 1.0, 1.0, u - 1.0)))


@triton.jit
def finish(row_max, exp_sum, exp_z_sum, z_target, inside):
    """Compute lse, logp and entropy from sums over all columns except the target.

    `inside` says whether the target is in the vocabulary. If the target has the largest logit, logp
    is -log1p(exp_sum), which is accurate even if the target's probability is nearly 1. z[target] -
    lse would subtract two numbers as large as the logits, and lose digits.
    """
    shifted = z_target - row_max
    # Add the exponential of the target to the sum, or 0 if the target is invalid.
    e_target = tl.where(inside, exp_fp32(shifted), 0.0)
    total = exp_sum + e_target
    log_total = tl.log(total)
    lp = tl.where(e_target == 1.0, -log1p(exp_sum), shifted - log_total)
    entropy = log_total - (exp_z_sum + tl.where(e_target > 0, e_target * shifted, 0.0)) / total
    return row_max + log_total, lp, entropy


@triton.jit
def softcapped(x, softcap):
    """Return the soft-capped value softcap·tanh(x/softcap) and its derivative 1 - tanh²."""
    u = x / softcap
    # Use the exponent -2·|u|, which is never positive, so that the exponential cannot overflow.
    t = exp_fp32(-2.0 * tl.abs(u))
    large = tl.where(u < 0, -1.0, 1.0) * (1.0 - t) / (1.0 + t)
    # For a small u, 1 - t would lose digits. There, approximate tanh by a least-squares polynomial,
    # which has a relative error of 7e-8 for |u| <= 0.5.
    w = u * u
    fit = w * (
        -0.33333327 + w * (0.13332961 + w * (-0.05389886 + w * (0.02129668 + w * -0.0066456)))
    )
    tanh = tl.where(tl.abs(u) < 0.5, u + u * fit, large)
    slope = 4.0 * t / ((1.0 + t) * (1.0 + t))
    return softcap * tanh, slope


@triton.jit
def capped_logits(raw, logit_scale, softcap, inv_temperature):
    """Apply the logit scale, the soft cap and the temperature to raw logits.

    `softcap` is None if there is no soft cap. Return the final logits z and the factor 1 - tanh² of
    the soft cap. Without a soft cap, the factor is 1.
    """
    tanh_slope = 1.0
    if softcap is None:
        z = raw * (logit_scale * inv_temperature)
    else:
        z, tanh_slope = softcapped(raw * logit_scale, softcap)
        z *= inv_temperature
    return z, tanh_slope


@triton.jit
def final_logits(raw, logit_scale, softcap, inv_temperature):
    """Return the final logits z and their derivative with respect to the raw logits."""
    z, tanh_slope = capped_logits(raw, logit_scale, softcap, inv_temperature)
    return z, tanh_slope * (logit_scale * inv_temperature)


# -------------------------------------------------------------- Coefficients of stored exponentials
# If lse - z[target] is at most this many nats, the stored exponentials of the row are exp(z -
# z[target]). Otherwise, they are exp(z - lse). The limit is far less than 88, where exp overflows
# in bf16 and fp32. Sums and products of exponentials thus do not overflow either.
MAX_NLL = tl.constexpr(40.0)


@triton.jit
def exceeds_max_nll(lse, z_target):
    """Return whether lse - z_target exceeds MAX_NLL. A NaN also counts as exceeding it."""
    return ~(lse - z_target <= MAX_NLL)


@triton.jit
def exponential_coefficients(
    g, lp, lse, rows, in_rows, raw_target_ptr, logit_scale, softcap, temperature
):
    """Return the coefficients by_row and by_target of the stored exponentials of a block of rows.

    by_row is g·unit, and by_target is g·target_unit, where g is dL/dlogp (see linear.py).
    Both are 0 if g is 0.
    """
    # Divide with div_rn, which rounds correctly on every architecture. All kernels then use the
    # same 1/temperature, bit for bit.
    inv_temperature = tl.div_rn(1.0, temperature)
    raw_target = tl.load(raw_target_ptr + rows, mask=in_rows, other=0.0)
    z_target, slope = final_logits(raw_target, logit_scale, softcap, inv_temperature)
    normaliser = tl.where(exceeds_max_nll(lse, z_target), lse, z_target)
    unit = -exp_fp32(normaliser - lse) * (logit_scale * inv_temperature)
    target_unit = -expm1(lp) * slope
    return tl.where(g == 0.0, 0.0, g * unit), tl.where(g == 0.0, 0.0, g * target_unit)


# ------------------------------------------------------------------- Epilogue of the LM head's GEMM
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
