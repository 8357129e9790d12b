"""Combine per-token rewards from several reward functions."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from grpo_fast.rewards.calling import Score


def score_sum(score: Score | str) -> float:
    """Return a completion's total reward. It is NaN if the score is None or an error reason."""
    if isinstance(score, list):
        return float(sum(score))
    return math.nan if score is None or isinstance(score, str) else score


def per_token_rewards(
    scored: list[tuple[float, list[Score | str]]],  # (weight, scores) of each function
    lengths: Sequence[int] | None,
) -> list[Tensor] | None:
    """Combine the scores of all functions into weighted rewards for each token.

    Args:
        scored: the weight of each function, and its score for each completion.
        lengths: number of tokens of each completion.

    Returns:
        An fp32 tensor for each completion. None if no function returned rewards per token.
    """
    if lengths is None or not any(isinstance(s, list) for _, scores in scored for s in scores):
        return None
    rewards = [torch.zeros(length, dtype=torch.float64) for length in lengths]
    for weight, scores in scored:
        for reward, score in zip(rewards, scores, strict=True):
            if isinstance(score, list):
                reward += weight * torch.tensor(score, dtype=torch.float64)
            elif score is not None:  # reward[-1:] is empty for an empty completion
                reward[-1:] += weight * score_sum(score)
    return [reward.float() for reward in rewards]
