"""THE table: one small function per loss type, value and slope side by side.

A leaf takes fp32 scalars (or tensors) `(logp, log_ratio, advantage, *params)` and returns `(loss,
slope)`, the loss of one token and its derivative. It is written in the vocabulary `+ - * / < <= >
== & exp log abs where clamp` of the module global `tl`, which is torch here: the readable
reference. `bind` gives the same code object another `tl`, so Triton compiles this very source
(kernels/gpu/rows.py). Adding a loss is one leaf and one line of `OBJECTIVES`.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch as tl

# Log ratios are clamped to this before exp, in value only: the gradient still restores.
LOG_RATIO_MAX = 20.0
# The same for the mean log ratio of gspo_token (2507.18071), whose gradient ends there.
MEAN_LOG_RATIO_MAX = 10.0

# (logp, log_ratio, advantage, *params) -> (loss, slope): numbers, tensors, or values of Triton.
TokenFunction = Callable[..., Any]
LEVELS = ("token", "sequence", "sequence_sum")


def reinforce(logp, log_ratio, advantage):
    """-A·lp (Williams 1992; "naive" in CS336)."""
    return -advantage * logp, -advantage


def unclipped(logp, log_ratio, advantage):
    """-r·A (CS336)."""
    loss = -tl.exp(log_ratio) * advantage
    return loss, loss


def ppo_clip(logp, log_ratio, advantage, epsilon_low, epsilon_high, delta):
    """-min(min(r, δ)·A, clip(r, 1-ε_low, 1+ε_high)·A).

    At a tie the unclipped branch keeps its gradient: it flows wherever the factor is the ratio.
    """
    ratio = tl.exp(log_ratio)
    bounded = tl.where(ratio < delta, ratio, delta)
    clipped = tl.clamp(ratio, 1.0 - epsilon_low, 1.0 + epsilon_high)
    chosen = tl.where(bounded * advantage <= clipped * advantage, bounded, clipped)
    return -chosen * advantage, tl.where(chosen == ratio, -ratio * advantage, 0.0)


def dual_clip(logp, log_ratio, advantage, epsilon_low, epsilon_high, dual_clip_c):
    """PPO clip, and for A < 0 the loss is at most -c·A (1912.09729)."""
    ratio = tl.exp(log_ratio)
    clipped = tl.clamp(ratio, 1.0 - epsilon_low, 1.0 + epsilon_high)
    chosen = tl.where(ratio * advantage <= clipped * advantage, ratio, clipped)
    chosen = tl.where((advantage < 0) & (chosen > dual_clip_c), dual_clip_c, chosen)
    return -chosen * advantage, tl.where(chosen == ratio, -ratio * advantage, 0.0)


def cispo(logp, log_ratio, advantage, ratio_min, ratio_max):
    """-sg(clamp(r))·A·lp (MiniMax-M1, 2506.13585)."""
    slope = -tl.clamp(tl.exp(log_ratio), ratio_min, ratio_max) * advantage
    return slope * logp, slope


def sapo(logp, log_ratio, advantage, temperature_pos, temperature_neg):
    """-A·σ(τ(r-1))·4/τ (2511.20347)."""
    ratio = tl.exp(log_ratio)
    tau = tl.where(advantage > 0, temperature_pos, temperature_neg)
    exponent = tau * (ratio - 1.0)
    gate = 1.0 / (1.0 + tl.exp(-exponent))
    closed = 1.0 / (1.0 + tl.exp(exponent))  # 1 - gate, which would cancel at large ratios
    return -4.0 / tau * gate * advantage, -4.0 * gate * closed * ratio * advantage


def vespo(logp, log_ratio, advantage, k_pos, lambda_pos, k_neg, lambda_neg):
    """-φ·A·lp with φ = sg(exp(λ + k·w - λ·e^w)); log_ratio is the sequence's log weight w (TRL)."""
    k = tl.where(advantage < 0, k_neg, k_pos)
    lam = tl.where(advantage < 0, lambda_neg, lambda_pos)
    slope = -tl.exp(lam + k * log_ratio - lam * tl.exp(log_ratio)) * advantage
    return slope * logp, slope


def gmpo(logp, log_ratio, advantage, epsilon_low, epsilon_high):
    """The one-sided clipped log ratio; `coefficients.py` takes -A·exp(its mean) (2507.20673)."""
    clipped = tl.where(
        advantage < 0,
        tl.where(log_ratio < -epsilon_low, -epsilon_low, log_ratio),
        tl.where(log_ratio > epsilon_high, epsilon_high, log_ratio),
    )
    return clipped, tl.where(clipped == log_ratio, 1.0, 0.0)


def dppo_tv(logp, log_ratio, advantage, epsilon_low, epsilon_high):
    """-A·sg(min(r, 20))·lp while p - p_old stays in the trust region on A's side (verl)."""
    ratio = tl.exp(log_ratio)
    moved = tl.exp(logp) - tl.exp(logp - log_ratio)
    inside = tl.where(advantage > 0, moved <= epsilon_high, moved >= -epsilon_low)
    slope = tl.where(inside, -advantage * tl.where(ratio < 20.0, ratio, 20.0), 0.0)
    return slope * logp, slope


def dppo_kl(logp, log_ratio, advantage, epsilon_low, epsilon_high):
    """As dppo_tv, with the binary KL of (p_old, p) as the distance (verl)."""
    ratio = tl.exp(log_ratio)
    p = tl.exp(logp)
    p_old = tl.exp(logp - log_ratio)
    divergence = -p_old * log_ratio + (1.0 - p_old) * tl.log(
        (1.0 - p_old + 1e-8) / (1.0 - p + 1e-8)
    )
    left = tl.where(
        advantage > 0,
        (divergence > epsilon_high) & (p > p_old),
        (divergence > epsilon_low) & (p < p_old),
    )
    slope = tl.where(left, 0.0, -advantage * tl.where(ratio < 20.0, ratio, 20.0))
    return slope * logp, slope


def kimi(logp, log_ratio, advantage, beta):
    """-(lp·A - ½·β·lr²) (Kimi k1.5; DRO)."""
    return -advantage * logp + 0.5 * beta * log_ratio * log_ratio, beta * log_ratio - advantage


class Objective(NamedTuple):
    """How one loss type is put together.

    Attributes:
        function: its function above.
        params: names of the leaf's hyperparameters, resolved by `LossConfig.params`.
        aggregation: default normaliser (`grpo_fast.objective.aggregation.AGGREGATIONS`).
        ratio_kind: what `log_ratio` is: "ratio" (the token's, or its completion's mean or sum at the
            levels of sequences), "detached_mean" (gspo_token), "sum" (vespo's log weight),
            "geometric" (gmpo).
        slope_of: "log_ratio" when the slope reaches logp through the ratio, "logp" when directly.
        levels: the importance_sampling_level values it has a meaning for.
        clips: metrics of clipping: "ppo", "cispo", "vespo" or None.
        reference: whether beta weighs a KL to `ref_logps`.
        raw_epsilon_high: default of epsilon_high where the loss reads it as a raw bound of the
            ratio.
        follows_advantage: whether the leaf's slope is 0 where the advantage is.
    """

    function: TokenFunction
    params: tuple[str, ...] = ()
    aggregation: str = "sequence_mean"
    ratio_kind: str = "ratio"
    slope_of: str = "log_ratio"
    levels: tuple[str, ...] = LEVELS
    clips: str | None = None
    reference: bool = True
    raw_epsilon_high: float | None = None
    follows_advantage: bool = True


CLIP = ("epsilon_low", "epsilon_high")
PPO = Objective(ppo_clip, (*CLIP, "delta"), clips="ppo")
CISPO = Objective(
    cispo, ("ratio_min", "ratio_max"), "token_mean_global", slope_of="logp", clips="cispo",
    raw_epsilon_high=5.0,
)  # fmt: skip
SAPO = Objective(sapo, ("sapo_temperature_pos", "sapo_temperature_neg"))
VESPO_PARAMS = ("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg")
KIMI = Objective(
    kimi, ("beta",), "token_mean_global", slope_of="logp", levels=("token",), reference=False,
    follows_advantage=False,
)  # fmt: skip

OBJECTIVES: dict[str, Objective] = {
    "reinforce": Objective(reinforce, (), "token_mean_global", slope_of="logp"),
    "unclipped": Objective(unclipped, (), "token_mean_global"),
    "grpo": PPO,
    "bnpo": PPO._replace(aggregation="token_mean_local"),
    "dr_grpo": PPO._replace(aggregation="fixed_length"),
    "dapo": PPO._replace(aggregation="token_mean_global"),
    "luspo": PPO._replace(aggregation="sequence_sum"),
    "dual_clip": Objective(dual_clip, (*CLIP, "dual_clip_c"), clips="ppo"),
    "cispo": CISPO,
    "sapo": SAPO,
    "vespo": Objective(
        vespo, VESPO_PARAMS, "token_mean_global", "sum", "logp", ("token",), "vespo"
    ),
    "gmpo": Objective(
        gmpo, CLIP, ratio_kind="geometric", levels=("token",), follows_advantage=False
    ),
    "gspo": PPO._replace(levels=("sequence",)),
    "gspo_token": PPO._replace(ratio_kind="detached_mean", slope_of="logp", levels=("token",)),
    "dppo_tv": Objective(dppo_tv, CLIP, "token_mean_global", slope_of="logp", levels=("token",)),
    "dppo_kl": Objective(dppo_kl, CLIP, "token_mean_global", slope_of="logp", levels=("token",)),
    "kimi": KIMI,
    "dro": KIMI,
}


def unchanged(function: TokenFunction) -> TokenFunction:
    return function


def bind(
    function: TokenFunction,
    tl: object,
    wrap: Callable[[TokenFunction], TokenFunction] = unchanged,
    words: Mapping[str, object] | None = None,
) -> TokenFunction:
    """The same function with another module behind `tl`, its helpers too.

    Args:
        function: a function of this module or of `kl.py`.
        tl: the module that gives exp, where, … (for example `triton.language`).
        wrap: applied to the function and to each helper it calls (for example `triton.jit`).
        words: helpers by name that replace the torch ones (for example `expm1`).
    """
    scope = {**function.__globals__, "tl": tl, **(words or {})}
    for name in function.__code__.co_names:
        helper = scope.get(name)
        if isinstance(helper, types.FunctionType) and helper.__module__ == function.__module__:
            scope[name] = bind(helper, tl, wrap, words)
    code = function.__code__
    return wrap(types.FunctionType(code, scope, function.__name__, function.__defaults__))
