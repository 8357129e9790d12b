"""KL estimators between the policy and a reference: value and slope of each, side by side.

With d = ref_logp - logp, each function returns `(value, slope)`, slope = d value / d logp. They are
written in the vocabulary of `objectives.py` and read by torch and Triton alike; `expm1` and
`expm1_minus` are words of that vocabulary which Triton lacks: kernels/gpu/math.py gives its own.
Source: http://joschu.net/blog/kl-approx.html
"""

from __future__ import annotations

from collections.abc import Callable

import torch as tl

# Beyond this difference k3 = e^d - d - 1 goes on as its tangent: finite, and the gradient still
# pulls back.
K3_GUARD = 20.0


def expm1(x):
    """e^x - 1 without cancellation."""
    return tl.expm1(x)


def expm1_minus(x):
    """e^x - 1 - x without cancellation (its leading term is x²/2), in fp64 and back."""
    wide = x.double()
    return (tl.expm1(wide) - wide).to(x.dtype)


def k1(d):
    return -d, d * 0.0 + 1.0


def absolute(d):
    return tl.abs(d), tl.where(d > 0, -1.0, tl.where(d < 0, 1.0, 0.0))


def k2(d):
    return 0.5 * d * d, -d


def k3(d):
    near = tl.clamp(d, -1e30, 20.0)
    slope = -expm1(near)
    return expm1_minus(near) - slope * (d - near), slope


def k3_straight_through(d):
    value, unused = k3(d)
    return value, -d


def k1_straight_through(d):
    return -d, -d


# No estimators: over the whole vocabulary, from both models' rows (objective/divergences.py); with
# the policy first, as in the lecture, or with the reference first.
EXACT = {"exact": "reverse_kl", "exact_reference_first": "forward_kl"}

KL_ESTIMATORS: dict[str, Callable] = {
    "k1": k1,
    "abs": absolute,
    "k2": k2,
    "k3": k3,
    "k3+": k3_straight_through,
    "k1+": k1_straight_through,
}
