"""KL estimators between the policy and a reference: value and slope of each, side by side.

With d = ref_logp - logp, each function returns `(value, slope)`, slope = d value / d logp, in the
vocabulary of `losses.py`; kernels/gpu/math.py has Triton's `expm1` and `expm1_minus`.
Source: http://joschu.net/blog/kl-approx.html
"""

from __future__ import annotations

from collections.abc import Callable

import torch as tl

# Beyond this difference k3 goes on as its tangent: finite, and the gradient still pulls back.
K3_GUARD = 20.0
INF = float("inf")


def expm1(x):
    """e^x - 1 without cancellation."""
    return tl.expm1(x)


def expm1_minus(x):
    """e^x - 1 - x without cancellation (its leading term is x²/2), in fp64 and back."""
    wide = x.double()
    return (tl.expm1(wide) - wide).to(x.dtype)


# An estimator's further arguments are the clamps of a config (`kl_limits`): of its value, and of d.
def clamped(value, slope, d, most, reach):
    """The value in [-most, most], and a slope of 0 where that or |d| > reach cut it off."""
    inside = (tl.abs(value) <= most) & (tl.abs(d) <= reach)
    return tl.clamp(value, -most, most), tl.where(inside, slope, 0.0)


def k1(d, most=INF, reach=INF):
    near = tl.clamp(d, -reach, reach)
    # Not 1.0: this slope has the shape of d, and its NaN.
    value, slope = clamped(-near, near * 0.0 + 1.0, d, most, reach)
    return value, slope


def absolute(d, most=INF, reach=INF):
    near = tl.clamp(d, -reach, reach)
    side = tl.where(d > 0, -1.0, tl.where(d < 0, 1.0, 0.0))
    value, slope = clamped(tl.abs(near), side, d, most, reach)
    return value, slope


def k2(d, most=INF, reach=INF):
    near = tl.clamp(d, -reach, reach)
    value, slope = clamped(0.5 * near * near, -near, d, most, reach)
    return value, slope


def k3(d, most=INF, reach=INF):
    taken = tl.clamp(d, -reach, reach)
    near = tl.clamp(taken, -1e30, 20.0)
    slope_near = -expm1(near)
    value, slope = clamped(
        expm1_minus(near) - slope_near * (taken - near), slope_near, d, most, reach
    )
    return value, slope


# Straight through: the clamps are the value's, the gradient is that of k2 everywhere (as verl's).
def k3_straight_through(d, most=INF, reach=INF):
    value, unused = k3(d, most, reach)
    return value, -d


def k1_straight_through(d, most=INF, reach=INF):
    value, unused = k1(d, most, reach)
    return value, -d


# No estimators: over the whole vocabulary, from both models' rows (objective/divergences.py); with
# the policy first, as in the lecture, or with the reference first.
EXACT = {"exact": "reverse_kl", "exact_reference_first": "forward_kl"}

KL_ESTIMATORS: dict[str, Callable[..., tuple[tl.Tensor, tl.Tensor]]] = {
    "k1": k1,
    "abs": absolute,
    "k2": k2,
    "k3": k3,
    "k3+": k3_straight_through,
    "k1+": k1_straight_through,
}
