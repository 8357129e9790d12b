"""Advantages of completions, relative to the mean of a group or to a running baseline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from grpo_fast import group_advantages
from grpo_fast.objective.advantages import Options
from grpo_fast.objective.baseline import running_baseline, split_options
from grpo_fast.rewards import RewardResult
from grpo_fast.rollout import Samples
from grpo_fast.train.config.run import GAE


class Advantages:
    """Advantage computation of a run, with the running baseline that some modes use.

    Args:
        mode: value of the setting `advantages`.
        options: value of the setting `advantage_options`.
        group_size: number of completions per prompt (G).
        weights: weight of each reward function. Functions with weight 0 are logged but do not
            contribute.
    """

    def __init__(
        self, mode: str, options: Options, group_size: int, weights: Mapping[str, float]
    ) -> None:
        self.weights = {name: weight for name, weight in weights.items() if weight}
        self.mode = mode
        self.group_size = group_size
        self.options, _ = split_options(mode, options)
        self.baseline = running_baseline(mode, options)

    def of(self, rewards: Tensor, scores: Mapping[str, Tensor], lengths: Sequence[int]) -> Tensor:
        """Compute the advantage of each completion.

        Args:
            rewards: weighted sum of the rewards of each completion, shape (N·G,). The completions
                of a prompt are adjacent.
            scores: rewards of each function, shape (N·G,). Mode gdpo normalizes each function's
                rewards separately.
            lengths: number of tokens of each completion, which mode opo needs for its baseline.

        Returns:
            fp32 tensor of shape (N·G,). In mode gae it contains the rewards, because the critic
            computes advantages per token later.
        """
        if self.mode == GAE:
            return rewards.float()
        options = dict(self.options)
        if self.baseline is not None:
            options["value"] = self.baseline.value
        if self.mode == "gdpo":
            options = {"weights": list(self.weights.values()), **options}
            each = torch.stack([scores[name] for name in self.weights])
            # NaN in `each` means that a function does not apply to a sample. NaN in `rewards` means
            # that a function failed. Set all rewards of such a sample to NaN, so that none counts.
            rewards = each.masked_fill(rewards.isnan(), torch.nan)
        if self.mode == "opo":
            options["lengths"] = torch.tensor(lengths)
        return group_advantages(rewards, self.mode, group_size=self.group_size, **options)

    def observe(self, rewards: Tensor) -> None:
        """Update the running baseline with the rewards of a step, if the mode has a baseline.

        Call this after `of`, so that the baseline of a step contains only rewards of earlier steps.
        """
        if self.baseline is not None:
            self.baseline.update(rewards)

    def state_dict(self) -> dict[str, float | None] | None:
        return None if self.baseline is None else dict(self.baseline.state_dict())

    def load_state_dict(self, state: Mapping[str, float | None] | None) -> None:
        if self.baseline is not None and state is not None:
            self.baseline.load_state_dict(state)


def token_rewards(result: RewardResult, samples: Samples) -> Tensor:
    """Return the reward of each completion token, fp32 of shape (R,).

    The token rewards of a sample sum to its reward. If the reward functions returned no rewards per
    token, the last token receives the reward of the sample. If a sample has no reward because a
    function failed, its last token is NaN.
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
