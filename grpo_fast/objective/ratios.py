"""The ratios of an objective, policy over old policy over sampler, clamped: exp cannot overflow."""

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

# A level with one ratio per completion: how it pools log ratios, and the slopes that come back.
POOLS: dict[str, Callable[[Tokens, Tensor], Tensor]] = {
    "sequence": Tokens.completion_mean,
    "sequence_sum": Tokens.completion_sum,
}


class Ratio(NamedTuple):
    """The importance ratio of the tokens, and how a slope by its log reaches the logps."""

    raw: Tensor  # (T,) logp - old_logp
    log: Tensor  # (T,) the log ratio the objective reads
    # (T,) → (B,): how a completion's log ratio is made of its tokens'; None: each has its own
    pool: Callable[[Tokens, Tensor], Tensor] | None = None

    def slope_to_logps(self, slope: Tensor, tokens: Tokens) -> Tensor:
        """dL/d(log ratio) → dL/dlogp: itself, or its completion's sum through the mean or sum."""
        return slope if self.pool is None else tokens.to_tokens(self.pool(tokens, slope))


def importance_ratio(
    logps: Tensor, old_logps: Tensor, sampling: Tensor | None, tokens: Tokens, config: LossConfig
) -> Ratio:
    raw = logps - old_logps
    window = OBJECTIVES[config.loss_type].ratio_kind
    if window == "sum":
        log_weight = tokens.completion_sum(raw.clamp(-20.0, 20.0))
        if sampling is not None:
            log_sampling = sampling.log().clamp(LOG_TINY, 20.0)
            per_token = any(x.weighs and x.level == "token" for x in config.corrections)
            pooled = tokens.completion_sum if per_token else tokens.completion_mean
            log_weight = log_weight + pooled(log_sampling)
        return Ratio(raw, tokens.to_tokens(log_weight.clamp(LOG_TINY, 20.0)))
    if window == "detached_mean":
        mean = tokens.completion_mean(raw).clamp(max=MEAN_LOG_RATIO_MAX)
        return Ratio(raw, tokens.to_tokens(mean))
    pool = POOLS.get(config.importance_sampling_level)
    if pool is not None:
        return Ratio(raw, tokens.to_tokens(pool(tokens, raw).clamp(max=LOG_RATIO_MAX)), pool)
    return Ratio(raw, raw.clamp(max=LOG_RATIO_MAX))


class Corrected(NamedTuple):
    """Weights and masks of the policy term, by the config's corrections."""

    weights: Tensor | None = None  # (T,) None: 1
    kept: Tensor | None = None  # (T,) bool, None: all
    clipped: Tensor | None = None  # (T,) bool: whose ratio a bound of "truncate" moved

    def apply(self, weights: Tensor, *, weigh: bool = True) -> Tensor:
        if self.kept is not None:
            weights = torch.where(self.kept, weights, 0.0)
        return weights * self.weights if weigh and self.weights is not None else weights


def corrected(logps: Tensor, old_logps: Tensor, tokens: Tokens, config: LossConfig) -> Corrected:
    """The config's corrections of these tokens; no gradient flows through them."""
    result = Corrected()
    for correction in config.corrections:
        if not correction.is_read(tokens):
            continue
        log_ratio = correction.log_ratio(logps, old_logps, tokens)
        inside = correction.inside(log_ratio, tokens)
        if correction.weighs:
            clipped = ~inside if correction.kind == "truncate" else None
            result = result._replace(weights=correction.weights(log_ratio, inside), clipped=clipped)
        else:
            result = result._replace(kept=inside if result.kept is None else inside & result.kept)
    return result
