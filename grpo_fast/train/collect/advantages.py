"""Advantages of completions, against their group or a running baseline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from grpo_fast import group_advantages
from grpo_fast.objective.baseline import running_baseline, split_options
from grpo_fast.train.config.run import GAE


class Advantages:
    """Computes advantages from rewards, as `advantages` and `advantage_options` say.

    weights: of the reward functions, by name; a function of weight 0 is only watched.
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
        """Return (N·G,) advantages; with a critic, which computes them per token, the rewards.

        Args:
            rewards: (N·G,) weighted sums, the G of a prompt next to each other.
            scores: (N·G,) of each reward function, which `gdpo` normalises one by one.
            lengths: tokens of each completion, by which `opo` weights its baseline.
        """
        if self.mode == GAE:
            return rewards.float()
        options = dict(self.options)
        if self.baseline is not None:
            options["value"] = self.baseline.value
        if self.mode == "gdpo":
            options = {"weights": list(self.weights.values()), **options}
            each = torch.stack([scores[name] for name in self.weights])
            # NaN of one function: it does not apply. A sample that a function has lost has none.
            rewards = each.masked_fill(rewards.isnan(), torch.nan)
        if self.mode == "opo":
            options["lengths"] = torch.tensor(lengths)
        return group_advantages(rewards, self.mode, group_size=self.group_size, **options)

    def observe(self, rewards: Tensor) -> None:
        """Move a running baseline on by a step's rewards, after its advantages are computed."""
        if self.baseline is not None:
            self.baseline.update(rewards)

    def state_dict(self) -> dict[str, Any] | None:
        return None if self.baseline is None else dict(self.baseline.state_dict())

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        if self.baseline is not None and state is not None:
            self.baseline.load_state_dict(state)
