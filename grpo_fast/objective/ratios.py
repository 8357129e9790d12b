"""The two ratios of an objective: policy over old policy (importance), old policy over sampler.

Each is clamped so that exp cannot overflow.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from grpo_fast.objective.config import LossConfig
from grpo_fast.objective.losses import LOG_RATIO_MAX, OBJECTIVES
from grpo_fast.objective.tokens import Tokens

LOG_TINY = math.log(1e-8)

# A level with one ratio per completion: how it pools log ratios, and the slopes that come back.
POOLS: dict[str, Callable[[Tokens, Tensor], Tensor]] = {
    "sequence": Tokens.completion_mean,
    "sequence_sum": Tokens.completion_sum,
}


class Ratio(NamedTuple):
    """The importance ratio of the tokens, and how a slope with respect to its log reaches the
    logps.
    """

    raw: Tensor  # (T,) logp - old_logp
    log: Tensor  # (T,) the log ratio the objective reads
    # (T,) → (B,): how a completion's log ratio is made of its tokens'; None: each has its own
    pool: Callable[[Tokens, Tensor], Tensor] | None = None

    def route(self, slope: Tensor, tokens: Tokens) -> Tensor:
        """dL/d(log ratio) → dL/dlogp: itself, or its completion's sum through the mean or sum."""
        return slope if self.pool is None else tokens.to_tokens(self.pool(tokens, slope))


def importance_ratio(
    logps: Tensor, old_logps: Tensor, sampling: Tensor | None, tokens: Tokens, config: LossConfig
) -> Ratio:
    """The log ratio at the level and in the window of the objective, clamped so that exp cannot
    overflow.
    """
    raw = logps - old_logps
    window = OBJECTIVES[config.loss_type].window
    if window == "sum":
        log_weight = tokens.completion_sum(raw.clamp(-20.0, 20.0))
        if sampling is not None:
            log_sampling = sampling.log().clamp(LOG_TINY, 20.0)
            per_token = str(config.sampling_correction).startswith("token")
            log_weight = log_weight + (
                tokens.completion_sum if per_token else tokens.completion_mean
            )(log_sampling)
        return Ratio(raw, tokens.to_tokens(log_weight.clamp(LOG_TINY, 20.0)))
    if window == "detached_mean":
        return Ratio(raw, tokens.to_tokens(tokens.completion_mean(raw).clamp(max=10.0)))
    pool = POOLS.get(config.importance_sampling_level)
    if pool is not None:
        return Ratio(raw, tokens.to_tokens(pool(tokens, raw).clamp(max=LOG_RATIO_MAX)), pool)
    return Ratio(raw, raw.clamp(max=LOG_RATIO_MAX))


def sampling_ratio(old_logps: Tensor, tokens: Tokens, config: LossConfig) -> Tensor | None:
    """(T,) exp(old_logp - sampling_logp), bounded; None without sampler logps or a correction.

    A NaN sampling_logp marks a token the sampler did not score: it counts as agreeing.
    """
    if tokens.sampling_logps is None or config.sampling_correction is None:
        return None
    level, bound = config.sampling_correction.split("_")
    log_ratio = torch.nan_to_num(old_logps - tokens.sampling_logps, nan=0.0)
    if level == "sequence":
        log_ratio = tokens.to_tokens(tokens.completion_sum(log_ratio))
    ratio = torch.exp(log_ratio.clamp(max=LOG_RATIO_MAX))
    if bound == "truncate":
        return ratio.clamp(max=config.sampling_ratio_cap)
    return torch.where(ratio <= config.sampling_ratio_cap, ratio, 0.0)
