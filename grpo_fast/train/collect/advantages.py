"""Advantages of completions, against their group or a running baseline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from grpo_fast import group_advantages
from grpo_fast.objective.baseline import running_baseline, split_options
from grpo_fast.rewards import RewardResult
from grpo_fast.train.config.run import GAE


class Advantages:
    """Rewards to advantages, by `advantages` and `advantage_options` of the configuration.

    weights: of the rewards, by their names; those of 0 are only watched.
    """

    def __init__(
        self, mode: str, options: Mapping[str, Any], group_size: int, weights: Mapping[str, float]
    ) -> None:
        self.weights = {name: weight for name, weight in weights.items() if weight}
        self.mode, self.group_size = mode, group_size
        self.options, _ = split_options(mode, options)
        self.baseline = running_baseline(mode, options)

    def of(self, scores: RewardResult, lengths: Sequence[int]) -> Tensor:
        """(N·G,) advantages of the rewards; a critic's come later, token by token: the rewards are
        returned till then.

        lengths: of the completions in tokens, by which `opo` weighs its baseline.
        """
        rewards = scores.total
        if self.mode == GAE:
            return rewards.float()
        options = dict(self.options)
        if self.baseline is not None:
            options["value"] = self.baseline.value
        if self.mode == "gdpo":
            options = {"weights": list(self.weights.values()), **options}
            rewards = torch.stack([scores.per_fn[name] for name in self.weights])
        if self.mode == "opo":
            options["lengths"] = torch.tensor(lengths)
        return group_advantages(rewards, self.mode, group_size=self.group_size, **options)

    def observe(self, rewards: Tensor) -> None:
        """Move a running baseline on by a step's rewards, after its advantages are made."""
        if self.baseline is not None:
            self.baseline.update(rewards)

    def state_dict(self) -> dict[str, Any] | None:
        return None if self.baseline is None else dict(self.baseline.state_dict())

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        if self.baseline is not None and state is not None:
            self.baseline.load_state_dict(state)
