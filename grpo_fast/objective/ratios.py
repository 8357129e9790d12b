"""Importance ratios and corrections of an objective. Log ratios are clamped, so exp is finite."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from grpo_fast.objective.config import LossConfig
from grpo_fast.objective.losses import LOG_RATIO_MAX, MEAN_LOG_RATIO_MAX, OBJECTIVES
from grpo_fast.objective.tokens import Tokens

LOG_TINY = math.log(1e-8)

# The levels that have one ratio per completion. Each has a function that pools (averages or sums)
# the log ratios of the tokens of a completion. Gradients with respect to the log ratios are pooled
# in the same way.
POOLS: dict[str, Callable[[Tokens, Tensor], Tensor]] = {
    "sequence": Tokens.completion_mean,
    "sequence_sum": Tokens.completion_sum,
}


class Ratio(NamedTuple):
    """Importance ratios of the tokens, and how they are pooled over completions."""

    raw: Tensor  # (T,) logp - old_logp
    log: Tensor  # (T,) log ratio that the loss function receives
    # Function that pools the log ratios of each completion, (T,) → (B,). None: one ratio per token.
    pool: Callable[[Tokens, Tensor], Tensor] | None = None

    def slope_to_logps(self, slope: Tensor, tokens: Tokens) -> Tensor:
        """Convert the slope dL/d(log ratio) into dL/dlogp, each (T,).

        If the log ratios of a completion are pooled, their slopes are pooled in the same way.
        """
        return slope if self.pool is None else tokens.to_tokens(self.pool(tokens, slope))


def importance_ratio(
    logps: Tensor, old_logps: Tensor, sampling: Tensor | None, tokens: Tokens, config: LossConfig
) -> Ratio:
    """Compute the ratio of the current to the old policy, as the loss function needs it.

    Args:
        logps: (T,), current policy.
        old_logps: (T,), old policy.
        sampling: (T,), importance weights from the corrections, or None. Only "vespo" reads them,
            and multiplies its ratio by them.
        tokens: the other per-token inputs.
        config: the objective.
    """
    raw = logps - old_logps
    kind = OBJECTIVES[config.loss_type].ratio_kind
    if kind == "sum":
        # Use the bounds and the order of operations of TRL's get_gamma_weights.
        log_weight = tokens.completion_sum(raw.clamp(-20.0, 20.0))
        if sampling is not None:
            log_sampling = sampling.log().clamp(LOG_TINY, 20.0)
            per_token = any(x.weighs and x.level == "token" for x in config.corrections)
            pooled = tokens.completion_sum if per_token else tokens.completion_mean
            log_weight = log_weight + pooled(log_sampling)
        return Ratio(raw, tokens.to_tokens(log_weight.clamp(LOG_TINY, 20.0)))
    if kind == "detached_mean":
        # The mean is detached, so `pool` is None. The gradient flows through the logp of the token
        # instead.
        mean = tokens.completion_mean(raw).clamp(max=MEAN_LOG_RATIO_MAX)
        return Ratio(raw, tokens.to_tokens(mean))
    if kind == "geometric":
        # Do not clamp here. `token_loss` clamps the mean of the log ratios, and a clamp of each log
        # ratio would change this mean.
        return Ratio(raw, raw)
    pool = POOLS.get(config.importance_sampling_level)
    if pool is not None:
        return Ratio(raw, tokens.to_tokens(pool(tokens, raw).clamp(max=LOG_RATIO_MAX)), pool)
    return Ratio(raw, raw.clamp(max=LOG_RATIO_MAX))


class Corrected(NamedTuple):
    """Weights and masks with which the corrections change the policy term."""

    weights: Tensor | None = None  # (T,); None: 1
    kept: Tensor | None = None  # (T,) bool; None: all
    clipped: Tensor | None = None  # (T,) bool: ratios that "truncate" clamped

    def apply(self, weights: Tensor, *, weigh: bool = True) -> Tensor:
        """Multiply weights (T,) by the corrections. With `weigh=False`, apply only the masks."""
        if self.kept is not None:
            weights = torch.where(self.kept, weights, 0.0)
        return weights * self.weights if weigh and self.weights is not None else weights


def corrected(logps: Tensor, old_logps: Tensor, tokens: Tokens, config: LossConfig) -> Corrected:
    """Compute the weights and masks of all corrections of the config, without gradient."""
    result = Corrected()
    for correction in config.corrections:
        if not correction.is_active(tokens):
            continue
        log_ratio = correction.log_ratio(logps, old_logps, tokens)
        inside = correction.inside(log_ratio, tokens)
        if correction.weighs:
            clipped = ~inside if correction.kind == "truncate" else None
            result = result._replace(weights=correction.weights(log_ratio, inside), clipped=clipped)
        else:
            result = result._replace(kept=inside if result.kept is None else inside & result.kept)
    return result
