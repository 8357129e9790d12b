"""KL estimators from the logps of the sampled tokens, and divergences of full distributions.

With d = ref_logp - logp, each function in KL_ESTIMATORS returns (value, slope), where slope =
∂value/∂logp. The values estimate KL(policy ‖ reference).
Source: http://joschu.net/blog/kl-approx.html

The functions in DIVERGENCES are for a student's distribution p and a teacher's distribution q, and
for one logit. With the student's logits z and D = Σ_j value_j, each returns value_j and slope_j =
p_j·∂D/∂p_j. The callers then compute dD/dz_j = slope_j - p_j·Σ_k slope_k. Arguments:

    p, q    probabilities of one vocabulary id
    d       log p - log q, or 0 if both logarithms are -inf
    near    e^-|d| - 1, from which q - p = (d >= 0 ? p : -q)·near is computed without cancellation
    beta    the teacher's share in the mixture of "jsd"

The values of `forward_kl` and `reverse_kl` contain an additional term, q - p or p - q. Its sum over
the vocabulary is 0, so it does not change D. With this term, no value is negative, and values of
nearly equal logits keep their digits. For |d| < 0.5, the function `expm1_minus` computes the
values.

Triton and C++ compile the same source, so the functions use only the operations listed in
`losses.py`. The Triton versions of `expm1`, `expm1_minus` and `log1p` are in kernels/gpu/math.py.
"""

from __future__ import annotations

from collections.abc import Callable

import torch as tl

# For d above this value, k3 is replaced by its tangent at this value. The estimate then stays
# finite, and its gradient still pulls the policy towards the reference.
K3_GUARD = 20.0
INF = float("inf")


def expm1(x):
    """Compute e^x - 1 without cancellation."""
    return tl.expm1(x)


def log1p(x):
    """Compute log(1 + x) without cancellation."""
    return tl.log1p(x)


def expm1_minus(x):
    """Compute e^x - 1 - x in fp64.

    For small x, the result is about x²/2. In fp32, the subtraction would lose all its digits.
    """
    x64 = x.double()
    return (tl.expm1(x64) - x64).to(x.dtype)


# Every estimator receives `LossConfig.kl_limits` as its last two arguments: value_max is the bound
# of |value|, and d_max is the bound of |d|.
def clamped(value, slope, d, value_max, d_max):
    """Clamp a value to ±value_max. Set the slope to 0 where |value| or |d| exceeds its bound."""
    inside = (tl.abs(value) <= value_max) & (tl.abs(d) <= d_max)
    return tl.clamp(value, -value_max, value_max), tl.where(inside, slope, 0.0)


def k1(d, value_max=INF, d_max=INF):
    """Compute -d = logp - ref_logp, an unbiased estimate of the KL with high variance."""
    near = tl.clamp(d, -d_max, d_max)
    # Write the slope 1 as near·0 + 1. It then has the shape of d and is NaN where d is NaN.
    return clamped(-near, near * 0.0 + 1.0, d, value_max, d_max)


def absolute(d, value_max=INF, d_max=INF):
    """Compute |d|, the absolute value of the estimate k1."""
    near = tl.clamp(d, -d_max, d_max)
    side = tl.where(d > 0, -1.0, tl.where(d < 0, 1.0, 0.0))
    return clamped(tl.abs(near), side, d, value_max, d_max)


def k2(d, value_max=INF, d_max=INF):
    """Compute d²/2, whose gradient is an unbiased estimate of the gradient of the KL."""
    near = tl.clamp(d, -d_max, d_max)
    return clamped(0.5 * near * near, -near, d, value_max, d_max)


def k3(d, value_max=INF, d_max=INF):
    """Compute the unbiased estimate e^d - d - 1, which is never negative.

    For d > 20, the tangent at 20 replaces the estimate (see K3_GUARD).
    """
    inside = tl.clamp(d, -d_max, d_max)
    near = tl.clamp(inside, -1e30, 20.0)
    slope = -expm1(near)
    value = expm1_minus(near) - slope * (inside - near)
    return clamped(value, slope, d, value_max, d_max)


# The straight-through estimators "k3+" and "k1+" have the values of k3 and k1, and the gradient of
# k2. As in verl, the clamps apply only to the value.
def k3_straight_through(d, value_max=INF, d_max=INF):
    value, unused = k3(d, value_max, d_max)
    return value, -d


def k1_straight_through(d, value_max=INF, d_max=INF):
    value, unused = k1(d, value_max, d_max)
    return value, -d


# Kinds of `linear_divergence` for the two exact KLs over the full vocabulary. "exact" is
# KL(policy ‖ reference), and "exact_reference_first" is KL(reference ‖ policy).
EXACT = {"exact": "reverse_kl", "exact_reference_first": "forward_kl"}

KL_ESTIMATORS: dict[str, Callable[..., tuple[tl.Tensor, tl.Tensor]]] = {
    "k1": k1,
    "abs": absolute,
    "k2": k2,
    "k3": k3,
    "k3+": k3_straight_through,
    "k1+": k1_straight_through,
}


# ---------------------------------------------------------------- Divergences of full distributions
def forward_kl(p, q, d, near, beta):
    """Compute KL(q ‖ p) = Σ q·(log q - log p)."""
    gap = tl.where(d >= 0, p, -q) * near
    close = q * expm1_minus(tl.clamp(d, -0.5, 0.5))
    return tl.where(tl.abs(d) < 0.5, close, tl.where(q == 0, 0.0, -q * d) - gap), -gap


def reverse_kl(p, q, d, near, beta):
    """Compute KL(p ‖ q) = Σ p·(log p - log q)."""
    gap = tl.where(d >= 0, p, -q) * near
    slope = tl.where(p == 0, 0.0, p * d)
    close = p * expm1_minus(tl.clamp(-d, -0.5, 0.5))
    return tl.where(tl.abs(d) < 0.5, close, slope + gap), slope


def jsd(p, q, d, near, beta):
    """Compute β·KL(q ‖ m) + (1 - β)·KL(p ‖ m) with m = (1 - β)·p + β·q.

    Source: GKD, https://arxiv.org/abs/2306.13649
    """
    larger = -log1p(tl.where(d >= 0, beta * near, (1.0 - beta) * near))
    above = larger + tl.clamp(d, -1e38, 0.0)  # log p - log m
    below = larger - tl.clamp(d, 0.0, 1e38)  # log q - log m
    slope = (1.0 - beta) * tl.where(p == 0, 0.0, p * above)
    direct = slope + beta * tl.where(q == 0, 0.0, q * below)
    close = (1.0 - beta) * p * expm1_minus(tl.clamp(-above, -0.5, 0.5))
    close = close + beta * q * expm1_minus(tl.clamp(-below, -0.5, 0.5))
    return tl.where(tl.abs(d) < 0.5, close, direct), slope


DIVERGENCES: dict[str, Callable[..., tuple[tl.Tensor, tl.Tensor]]] = {
    "forward_kl": forward_kl, "reverse_kl": reverse_kl, "jsd": jsd,
}  # fmt: skip
