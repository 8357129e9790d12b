"""Divergences between a student's distribution p and a teacher's distribution q, for one logit.

With the student's logits z and D = Σ_j value_j, each function returns value_j and slope_j =
p_j·∂D/∂p_j. The callers then compute dD/dz_j = slope_j - p_j·Σ_k slope_k. Triton and C++ compile
the same source, so the functions use only the operations listed in `losses.py`. Arguments:

    p, q    probabilities of one vocabulary id
    d       log p - log q, or 0 if both logarithms are -inf
    near    e^-|d| - 1, from which q - p = (d >= 0 ? p : -q)·near is computed without cancellation
    beta    the teacher's share in the mixture of "jsd"

The values of the KLs contain an additional term, q - p or p - q. Its sum over the vocabulary is 0,
so it does not change D. With this term, no value is negative, and values of nearly equal logits
keep their digits. For |d| < 0.5, the function `expm1_minus` computes the values.
"""

from __future__ import annotations

from collections.abc import Callable

import torch as tl

from grpo_fast.objective.kl import expm1_minus


def log1p(x):
    """Compute log(1 + x) without cancellation."""
    return tl.log1p(x)


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
