"""KL estimators between the policy and a reference: value and slope of each, side by side.

With d = ref_logp - logp, each function returns `(value, slope)`, slope = d value / d logp. They are written in the
vocabulary described in `objectives.py` and read by torch and Triton alike. Source: http://joschu.net/blog/kl-approx.html
"""

from __future__ import annotations

from collections.abc import Callable

import torch as tl

# Beyond this difference k3 = e^d - d - 1 goes on as its tangent: finite, and the gradient still pulls back.
K3_GUARD = 20.0


def expm1(x):
    """e^x - 1 without cancellation: a series where |x| is small (error < 2e-8), the difference elsewhere."""
    small = tl.where(tl.abs(x) < 0.25, x, 0.0)
    tail = 1.0 + small / 5.0 * (1.0 + small / 6.0 * (1.0 + small / 7.0 * (1.0 + small / 8.0)))
    series = small * (1.0 + small / 2.0 * (1.0 + small / 3.0 * (1.0 + small / 4.0 * tail)))
    return tl.where(tl.abs(x) < 0.25, series, tl.exp(x) - 1.0)


def expm1_minus(x):
    """e^x - 1 - x without cancellation, as k3 needs it for x near 0."""
    small = tl.where(tl.abs(x) < 0.25, x, 0.0)
    tail = 1.0 + small / 6.0 * (1.0 + small / 7.0 * (1.0 + small / 8.0 * (1.0 + small / 9.0)))
    series = small * small * 0.5 * (1.0 + small / 3.0 * (1.0 + small / 4.0 * (1.0 + small / 5.0 * tail)))
    return tl.where(tl.abs(x) < 0.25, series, tl.exp(x) - 1.0 - x)


def k1(d):
    return -d, 1.0 + d * 0.0


def absolute(d):
    return tl.abs(d), tl.where(d > 0, -1.0, tl.where(d < 0, 1.0, 0.0))


def k2(d):
    return 0.5 * d * d, -d


def k3(d):
    near = tl.where(d < 20.0, d, 20.0)
    slope = -expm1(near)
    return expm1_minus(near) - slope * (d - near), slope


def k3_straight_through(d):
    value, unused = k3(d)
    return value, -d


def k1_straight_through(d):
    return -d, -d


KL_ESTIMATORS: dict[str, Callable] = {
    "k1": k1,
    "abs": absolute,
    "k2": k2,
    "k3": k3,
    "k3+": k3_straight_through,
    "k1+": k1_straight_through,
}
