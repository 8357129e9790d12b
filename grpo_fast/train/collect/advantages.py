"""Advantages of completions relative to their group or to a running baseline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from grpo_fast import group_advantages
from grpo_fast.objective.baseline import running_baseline, split_options
from grpo_fast.rewards import RewardResult
from grpo_fast.rollout import Samples
from grpo_fast.train.config.run import GAE


class Advantages:
    """Computation of advantages from rewards.

    Args:
        mode: the setting `advantages`.
        options: the setting `advantage_options`.
        group_size: completions per prompt (G).
        weights: weight of each reward function. A function of weight 0 is only logged.
    """

    def __init__(
        self, mode: str, options: Mapping[str, Any], group_size: int, weights: Mapping[str, float]
    ) -> None:
        self.weights = {name: weight for name, weight in weights.items() if weight}
        self.mode = mode
        self.group_size = group_size
        self.options, _ = split_options(mode, options)
        self.baseline = running_baseline(mode, options)

    def of(self, rewards: Tensor, scores: Mapping[str, Tensor], lengths: Sequence[int]) -> Tensor:
        """Compute the advantages of completions.

        Args:
            rewards: weighted sums of the rewards, shape (N·G,). The completions of a prompt are
                adjacent.
            scores: rewards of each function, shape (N·G,), which gdpo normalises one by one.
            lengths: tokens of each completion, for the baseline of opo.

        Returns:
            Tensor of shape (N·G,). With a critic, which computes advantages per token later, it
            contains the rewards.
        """
        if self.mode == GAE:
            return rewards.float()
        options = dict(self.options)
        if self.baseline is not None:
            options["value"] = self.baseline.value
        if self.mode == "gdpo":
            options = {"weights": list(self.weights.values()), **options}
            each = torch.stack([scores[name] for name in self.weights])
            # NaN in `each` means that a function does not apply. NaN in `rewards` means that a
            # function failed, and then the sample has no reward at all.
            rewards = each.masked_fill(rewards.isnan(), torch.nan)
        if self.mode == "opo":
            options["lengths"] = torch.tensor(lengths)
        return group_advantages(rewards, self.mode, group_size=self.group_size, **options)

    def observe(self, rewards: Tensor) -> None:
        """Update a running baseline with the rewards of a step. Call this after `of`."""
        if self.baseline is not None:
            self.baseline.update(rewards)

    def state_dict(self) -> dict[str, Any] | None:
        return None if self.baseline is None else dict(self.baseline.state_dict())

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        if self.baseline is not None and state is not None:
            self.baseline.load_state_dict(state)


def token_rewards(result: RewardResult, samples: Samples) -> Tensor:
    """Return the rewards of completion tokens, shape (R,), which sum to the samples' rewards.

    Without rewards per token the last token has the reward of the sample. The last token of a
    sample that lost its reward is NaN.
    """
    lengths = torch.tensor(samples.lengths)
    rewards = torch.zeros(len(samples.logps))
    has_own = torch.zeros(len(samples), dtype=torch.bool)
    if result.per_token is not None:
        has_own = ~result.total.isnan()
        rewards = torch.where(
            has_own.repeat_interleave(lengths), torch.cat(result.per_token), rewards
        )
    at_end = ~has_own & (lengths > 0)
    rewards[samples.rows[1:][at_end] - 1] = result.total[at_end]
    return rewards
