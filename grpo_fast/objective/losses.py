"""Per-token loss functions, one for each loss formula.

A function takes fp32 scalars or tensors `(logp, log_ratio, advantage, *params)`. It returns the
loss of one token, and the slope: the derivative of the loss with respect to the variable that
`Objective.slope_of` names, log_ratio or logp.

The code uses only the operations `+ - * / < <= > >= == & exp log abs where clamp` of the module
global `tl`. In this file, `tl` is torch, so the functions are a readable reference. `bind` copies a
function with a different module as `tl`. Triton compiles such a copy (`device_function` in
kernels/gpu/tokens.py), and C++ is generated from the same source (kernels/cpu/loss_codegen.py).

To add a loss, write one function and add one line to `OBJECTIVES`.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch as tl

# Log ratios are clamped to this upper bound before exp. The slope ignores the clamp, so that the
# gradient still pulls the policy back.
LOG_RATIO_MAX = 20.0
# gspo_token (https://arxiv.org/abs/2507.18071) clamps the mean log ratio to this upper bound. Above
# the bound, the slope is 0.
MEAN_LOG_RATIO_MAX = 10.0

# Type of a loss function with the signature (logp, log_ratio, advantage, *params) -> (loss, slope).
# The arguments are numbers, tensors or Triton values.
TokenFunction = Callable[..., Any]
LEVELS = ("token", "sequence", "sequence_sum")


def reinforce(logp, log_ratio, advantage):
    """Compute the loss -A·logp and its slope (REINFORCE, Williams 1992; CS336 calls it "naive")."""
    return -advantage * logp, -advantage


def unclipped(logp, log_ratio, advantage):
    """Compute the loss -r·A and its slope, where r is the importance ratio (CS336 assignment)."""
    loss = -tl.exp(log_ratio) * advantage
    return loss, loss


def ppo_clip(logp, log_ratio, advantage, epsilon_low, epsilon_high, delta):
    """Compute -min(min(r, δ)·A, clip(r, 1-ε_low, 1+ε_high)·A), the clipped loss of PPO.

    r is the importance ratio and A the advantage. INTELLECT-2 added the bound δ. If both arguments
    of the outer minimum are equal, the unclipped one is chosen, because it has a gradient.
    """
    ratio = tl.exp(log_ratio)
    bounded = tl.where(ratio < delta, ratio, delta)
    clipped = tl.clamp(ratio, 1.0 - epsilon_low, 1.0 + epsilon_high)
    chosen = tl.where(bounded * advantage <= clipped * advantage, bounded, clipped)
    return -chosen * advantage, tl.where(chosen == ratio, -ratio * advantage, 0.0)


def dual_clip(logp, log_ratio, advantage, epsilon_low, epsilon_high, dual_clip_c):
    """Compute the loss of `ppo_clip` without δ. If A < 0, the loss is limited to at most -c·A.

    Source: https://arxiv.org/abs/1912.09729
    """
    ratio = tl.exp(log_ratio)
    clipped = tl.clamp(ratio, 1.0 - epsilon_low, 1.0 + epsilon_high)
    chosen = tl.where(ratio * advantage <= clipped * advantage, ratio, clipped)
    chosen = tl.where((advantage < 0) & (chosen > dual_clip_c), dual_clip_c, chosen)
    return -chosen * advantage, tl.where(chosen == ratio, -ratio * advantage, 0.0)


def cispo(logp, log_ratio, advantage, ratio_min, ratio_max):
    """Compute -sg(clamp(r))·A·logp, where sg stops the gradient of the importance ratio r.

    Source: MiniMax-M1, https://arxiv.org/abs/2506.13585
    """
    slope = -tl.clamp(tl.exp(log_ratio), ratio_min, ratio_max) * advantage
    return slope * logp, slope


def sapo(logp, log_ratio, advantage, temperature_pos, temperature_neg):
    """Compute -A·σ(τ(r-1))·4/τ with sigmoid σ (SAPO, https://arxiv.org/abs/2511.20347)."""
    ratio = tl.exp(log_ratio)
    tau = tl.where(advantage > 0, temperature_pos, temperature_neg)
    exponent = tau * (ratio - 1.0)
    gate = 1.0 / (1.0 + tl.exp(-exponent))
    closed = 1.0 / (1.0 + tl.exp(exponent))  # equals 1 - gate, without cancellation at large ratios
    return -4.0 / tau * gate * advantage, -4.0 * gate * closed * ratio * advantage


def vespo(logp, log_ratio, advantage, k_pos, lambda_pos, k_neg, lambda_neg):
    """Compute -φ·A·logp with φ = sg(exp(λ + k·w - λ·e^w)), as TRL does.

    w = log_ratio is the logarithm of the completion's weight, and sg stops the gradient.
    """
    k = tl.where(advantage < 0, k_neg, k_pos)
    lam = tl.where(advantage < 0, lambda_neg, lambda_pos)
    slope = -tl.exp(lam + k * log_ratio - lam * tl.exp(log_ratio)) * advantage
    return slope * logp, slope


def gmpo(logp, log_ratio, advantage, epsilon_low, epsilon_high):
    """Clip the log ratio from above at ε_high if A >= 0, and from below at -ε_low if A < 0.

    `coefficients.py` averages the clipped log ratios of a completion, and computes the loss
    -A·exp(mean).

    Source: GMPO, https://arxiv.org/abs/2507.20673
    """
    from_below = tl.where(log_ratio < -epsilon_low, -epsilon_low, log_ratio)
    from_above = tl.where(log_ratio > epsilon_high, epsilon_high, log_ratio)
    clipped = tl.where(advantage < 0, from_below, from_above)
    return clipped, tl.where(clipped == log_ratio, 1.0, 0.0)


def dppo_tv(logp, log_ratio, advantage, epsilon_low, epsilon_high):
    """Compute -A·sg(min(r, 20))·logp inside a trust region around p_old, as verl does.

    p and p_old are the token's probabilities, r is p/p_old, and sg stops the gradient. The trust
    region bounds p - p_old. The loss is 0 if p is outside the trust region and the gradient of A
    would move p further away from p_old.
    """
    ratio = tl.exp(log_ratio)
    moved = tl.exp(logp) - tl.exp(logp - log_ratio)
    inside = tl.where(advantage > 0, moved <= epsilon_high, moved >= -epsilon_low)
    slope = tl.where(inside, -advantage * tl.where(ratio < 20.0, ratio, 20.0), 0.0)
    return slope * logp, slope


def dppo_kl(logp, log_ratio, advantage, epsilon_low, epsilon_high):
    """Compute the loss of `dppo_tv`, but with a trust region that bounds a binary KL, as verl does.

    The binary KL is KL(p_old ‖ p) over two outcomes: the token itself or any other token.
    """
    ratio = tl.exp(log_ratio)
    p = tl.exp(logp)
    p_old = tl.exp(logp - log_ratio)
    log_others = tl.log((1.0 - p_old + 1e-8) / (1.0 - p + 1e-8))
    divergence = -p_old * log_ratio + (1.0 - p_old) * log_others
    too_high = (divergence > epsilon_high) & (p > p_old)
    too_low = (divergence > epsilon_low) & (p < p_old)
    outside = tl.where(advantage > 0, too_high, too_low)
    slope = tl.where(outside, 0.0, -advantage * tl.where(ratio < 20.0, ratio, 20.0))
    return slope * logp, slope


def kimi(logp, log_ratio, advantage, beta):
    """Compute the loss -(A·logp - β/2·log_ratio²), which Kimi k1.5 and DRO use.

    A log ratio above LOG_RATIO_MAX counts as LOG_RATIO_MAX.
    """
    return -advantage * logp + 0.5 * beta * log_ratio * log_ratio, beta * log_ratio - advantage


class Objective(NamedTuple):
    """Definition of one loss type.

    Attributes:
        function: the per-token loss function.
        params: names of the hyperparameters of the function. `LossConfig.params` returns their
            values.
        aggregation: the default aggregation.
        ratio_kind: the meaning of the log_ratio that the function receives. "ratio": the log ratio
            of the token, or of its completion at sequence level. "detached_mean" (gspo_token): the
            mean log ratio of the completion, without gradient. "sum" (vespo): the log weight of the
            completion. "geometric" (gmpo): the log ratio of the token. Only for "geometric", the
            results of the function are averaged over the completion.
        slope_of: "log_ratio" or "logp". The slope that the function returns is the derivative of
            the loss with respect to this variable.
        levels: the values of importance_sampling_level that the loss supports.
        clips: the clip metrics to report: "ppo", "cispo", "vespo" or None.
        reference: True if beta is the weight of a KL to `ref_logps`.
        raw_epsilon_high: default of epsilon_high for a loss in which it bounds the ratio itself.
        follows_advantage: True if the slope is 0 where the advantage is 0.
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
    "sapo": Objective(sapo, ("sapo_temperature_pos", "sapo_temperature_neg")),
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


def bind(
    function: TokenFunction,
    words: Mapping[str, object],
    wrap: Callable[[TokenFunction], TokenFunction] = lambda x: x,
) -> TokenFunction:
    """Return a copy of a loss function and of its helpers with a different module as `tl`.

    Args:
        function: a function of this module or `kl.py`.
        words: replacements for globals of the module. "tl" is the module with exp, where and the
            other operations, for example `triton.language`. Other keys are helpers, such as
            "expm1".
        wrap: a decorator for the function and for each helper, for example `triton.jit`.
    """
    scope = {**function.__globals__, **words}
    for name in function.__code__.co_names:
        helper = scope.get(name)
        if isinstance(helper, types.FunctionType) and helper.__module__ == function.__module__:
            scope[name] = bind(helper, words, wrap)
    code = function.__code__
    return wrap(types.FunctionType(code, scope, function.__name__, function.__defaults__))
