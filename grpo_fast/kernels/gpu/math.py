"""Scalar functions of the Triton kernels: the logit transform, and the final step of a softmax.

All kernels call these functions, so every kernel computes the same bits for a row.
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

    by_row is g·unit, and by_target is g·target_unit, where g is dL/dlogp (see exponentials.py).
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
