"""Scalar building blocks of the Triton kernels: from raw logits to z, and from running sums to lse,
lp and entropy.

Both files of kernels use these very functions, so a row's numbers do not depend on which of them
computed it.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
# The running maximum starts here and not at -inf: a leading block of -inf columns then gives
# exp(-inf) = 0 and no inf - inf. It lies shifted every logit that means something and above the -3e38
# that masks a column.
FLOOR = tl.constexpr(-1.0e30)


@triton.jit
def exp_fp32(x):
    return tl.exp2(x * LOG2E)


@triton.jit
def expm1_minus(x):
    """e^x - 1 - x: the series x²/2 · (1 + x/3 · (1 + …)) where the difference would cancel."""
    s = tl.where(tl.abs(x) < 1.0, x, 0.0)
    tail = 1.0 + s / 9.0 * (1.0 + s / 10.0 * (1.0 + s / 11.0 * (1.0 + s / 12.0)))
    tail = 1.0 + s / 5.0 * (1.0 + s / 6.0 * (1.0 + s / 7.0 * (1.0 + s / 8.0 * tail)))
    series = s * s * 0.5 * (1.0 + s / 3.0 * (1.0 + s / 4.0 * tail))
    return tl.where(tl.abs(x) < 1.0, series, exp_fp32(x) - 1.0 - x)


@triton.jit
def expm1(x):
    return tl.where(tl.abs(x) < 1.0, x + expm1_minus(x), exp_fp32(x) - 1.0)


@triton.jit
def log1p(x):
    """log(1 + x) for x > -1; the quotient takes back what rounding 1 + x lost."""
    u = 1.0 + x
    return tl.where(u == 1.0, x, tl.log(u) * (x / tl.where(u == 1.0, 1.0, u - 1.0)))


@triton.jit
def finish(row_max, exp_sum, exp_z_sum, z_target, inside):
    """lse, lp, entropy from the maximum, Σ e and Σ e·(z - row_max) over all columns but the target,
    and the target's z.

    With the target outside of the sum the log-probability of a token that is nearly certain is
    -log1p(exp_sum): it keeps its digits, where z[target] - lse would be a difference of two numbers of
    the size of the logits.
    """
    shifted = z_target - row_max
    e_target = tl.where(inside, exp_fp32(shifted), 0.0)
    total = exp_sum + e_target
    log_total = tl.log(total)
    lp = tl.where(e_target == 1.0, -log1p(exp_sum), shifted - log_total)
    entropy = log_total - (exp_z_sum + tl.where(e_target > 0, e_target * shifted, 0.0)) / total
    return row_max + log_total, lp, entropy


@triton.jit
def softcapped(x, softcap):
    """softcap·tanh(x/softcap) and the slope 1 - tanh²."""
    u = x / softcap
    t = exp_fp32(-2.0 * tl.abs(u))
    large = tl.where(u < 0, -1.0, 1.0) * (1.0 - t) / (1.0 + t)
    # 1 - t has few digits left for a small u; least-squares fit of tanh, relative error 7e-8 for
    # |u| <= 0.5.
    w = u * u
    fit = w * (
        -0.33333327 + w * (0.13332961 + w * (-0.05389886 + w * (0.02129668 + w * -0.0066456)))
    )
    tanh = tl.where(tl.abs(u) < 0.5, u + u * fit, large)
    slope = 4.0 * t / ((1.0 + t) * (1.0 + t))
    return softcap * tanh, slope


@triton.jit
def capped_logits(raw, logit_scale, softcap, inv_temperature):
    """Raw logits -> z and 1 - tanh²; softcap is None (a constexpr) or a number."""
    tanh_slope = 1.0
    if softcap is None:
        z = raw * (logit_scale * inv_temperature)
    else:
        z, tanh_slope = softcapped(raw * logit_scale, softcap)
        z *= inv_temperature
    return z, tanh_slope


@triton.jit
def final_logits(raw, logit_scale, softcap, inv_temperature):
    """Raw logits -> z and d z / d raw."""
    z, tanh_slope = capped_logits(raw, logit_scale, softcap, inv_temperature)
    slope = logit_scale * inv_temperature
    if softcap is not None:
        slope = tanh_slope * slope
    return z, slope


# A row's weights are exp(z - z[target]) as long as lse - z[target] stays shifted this, so high_nll from
# both ends of the range of bf16 and of fp32 that sums and products with anything reasonable stay
# inside.
MAX_NLL = tl.constexpr(40.0)


@triton.jit
def exceeds_max_nll(lse, z_target):
    """Whether exp(z - z_target) may leave the range of bf16 in this row; true for NaN."""
    return ~(lse - z_target <= MAX_NLL)


@triton.jit
def inverse_temperature(temperature_ptr, temperature, row):
    if temperature_ptr is not None:
        temperature = tl.load(temperature_ptr + row)
    return tl.div_rn(1.0, temperature)
