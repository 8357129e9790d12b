"""What a step learns from: completions with their rewards and advantages."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from grpo_fast import group_advantages
from grpo_fast.data import Example
from grpo_fast.rewards import RewardResult, RewardSet
from grpo_fast.rollout import Rollout, generate
from grpo_fast.train.baseline import RunningBaseline, split_options
from grpo_fast.train.config import RunConfig
from grpo_fast.train.metrics import Clock
from grpo_fast.train.policy import Policy


class Collected(NamedTuple):
    """N·G scored completions, the G of a prompt side by side."""

    rollout: Rollout
    examples: list[Example]  # of each completion (so each G times)
    scores: RewardResult
    advantages: Tensor  # (N·G,) fp32


def collect(
    policy: Policy,
    examples: list[Example],
    rewards: RewardSet,
    config: RunConfig,
    step: int,
    clock: Clock,
    baseline: RunningBaseline | None = None,
) -> Collected:
    """G completions of each example's prompt, and what they are worth.

    A running baseline, where there is one, takes in the rewards after their advantages are made.
    """
    group_size = config.rollout.group_size
    prompts = [example.prompt for example in examples]
    seed = (config.seed, step)
    rollout = generate(policy, prompts, config.rollout, group_size=group_size, seed=seed)
    clock.lap("rollout")
    repeated = [example for example in examples for _ in range(group_size)]
    answers = [example.answer for example in repeated]
    scores = rewards([example.prompt for example in repeated], rollout.texts, answers)
    advantages = advantages_of(scores.total, rollout, config, baseline)
    if baseline is not None:
        baseline.update(scores.total)
    clock.lap("reward")
    return Collected(rollout, repeated, scores, advantages)


def advantages_of(
    rewards: Tensor, rollout: Rollout, config: RunConfig, baseline: RunningBaseline | None = None
) -> Tensor:
    """(N·G,) advantages; `opo` weighs its baseline by the completions' lengths."""
    options, _ = split_options(config.advantages, config.advantage_options)
    if baseline is not None:
        options["value"] = baseline.value
    if config.advantages == "opo":
        options["lengths"] = torch.tensor(rollout.lengths)
    size = config.rollout.group_size
    return group_advantages(rewards, config.advantages, group_size=size, **options)
