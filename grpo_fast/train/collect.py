"""Collection of the samples of a step: prompts, completions, rewards and advantages.

With several ranks, each rank samples completions for its share of the prompts, and rank 0 scores
all completions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from grpo_fast import group_advantages, rewards, rollout
from grpo_fast.data import Example
from grpo_fast.objective.advantages import Options
from grpo_fast.objective.baseline import running_baseline, split_options
from grpo_fast.rewards import RewardResult, RewardSet
from grpo_fast.rollout import Engine, Samples, Sampling, awake, prompt_texts
from grpo_fast.train import ranks
from grpo_fast.train.config import GAE, RolloutConfig
from grpo_fast.train.metrics import (
    Clock,
    check_versions,
    completion_metrics,
    reward_metrics,
    support_metrics,
)
from grpo_fast.train.models.policy import Policy


@dataclass
class Collector:
    """Collector that samples completions, scores them and computes their advantages."""

    config: RolloutConfig
    policy: Policy
    engine: Engine
    rewards: RewardSet
    queue: PromptQueue
    advantages: Advantages
    seed: int  # seed of the run
    steps: int  # steps of the run

    def next(self, step: int, clock: Clock) -> tuple[Samples, dict[str, float]]:
        """Return the samples of a step, and their metrics.

        The group number of a sample is the queue position of its prompt.

        Args:
            step: number of the step, counted from 1.
            clock: clock that measures the time of each part of the step.
        """
        # 1. Sample completions.
        size = self.config.group_size
        places = self.queue.take(self.config.prompts_per_step)
        prompts = [self.queue.example(place).prompt for place in places]
        with awake(self.engine, self.policy, version=step - 1):
            samples = generate(
                self.policy, prompts, self.config, engine=self.engine, group_size=size,
                seed=(self.seed, step),
            )  # fmt: skip
        samples.group += places.start
        check_versions(samples, step)
        clock.lap("rollout", tokens=sum(samples.lengths))
        # 2. Call the reward functions. Render the chat template once per group, because all samples
        # of a group share the prompt.
        sent = [text for text in prompt_texts(self.policy, prompts) for _ in range(size)]
        done = step - 1
        epoch = done * len(places) / len(self.queue.examples)
        self.rewards.progress |= {"global_step": done, "max_steps": self.steps, "epoch": epoch}
        examples = self.examples_of(samples)
        result = score(self.rewards, examples, samples.texts, samples.completion_ids, sent)
        samples.rewards = result.total
        samples.scores = result.per_fn
        clock.lap("reward")
        # 3. Compute the advantages. Update the baseline afterwards, so that the advantages of a
        # step see only earlier rewards.
        samples.advantages = self.advantages.of(result.total, samples.scores, samples.lengths)
        if self.advantages.baseline is not None:
            self.advantages.baseline.update(result.total)
        return samples, {
            **reward_metrics(result.total, samples.scores, result.reasons, size),
            **completion_metrics(samples),
            **support_metrics(samples),
        }

    def examples_of(self, samples: Samples) -> list[Example]:
        """Return the training example that each sample belongs to."""
        return [self.queue.example(place) for place in samples.group.tolist()]

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the data, and the states of the rewards and the baseline."""
        baseline = self.advantages.baseline
        return {
            "consumed": self.queue.consumed,
            "lost_rewards": self.rewards.state_dict(),
            "baseline": None if baseline is None else dict(baseline.state_dict()),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.queue.consumed = state["consumed"]
        self.rewards.load_state_dict(state["lost_rewards"])
        if self.advantages.baseline is not None and state["baseline"] is not None:
            self.advantages.baseline.load_state_dict(state["baseline"])


# ------------------------------------------------------------------------------ Several ranks
def generate(
    policy: Any, prompts: Sequence[Any], options: Sampling, *, engine: Engine | None = None,
    **others: Any,
) -> Samples:  # fmt: skip
    """Sample completions for all prompts, which are divided among the ranks.

    Args:
        policy: the policy from which to sample.
        prompts: all prompts of the step.
        options: the sampling options.
        engine: the engine that samples. None uses transformers.
        **others: further arguments of `rollout.generate`.

    Returns:
        The samples of all prompts, on every rank. They do not depend on the number of ranks.
    """
    if ranks.size() == 1:
        return rollout.generate(policy, prompts, options, engine=engine, **others)
    count = len(prompts)
    first = count * ranks.rank() // ranks.size()
    places = range(first, count * (ranks.rank() + 1) // ranks.size())
    is_apart = engine is not None and engine.is_apart
    own = None
    with ranks.unsharded(policy.lm) if policy.is_sharded and not is_apart else nullcontext():
        if places:
            part = prompts[places.start : places.stop]
            own = rollout.generate(policy, part, options, engine=engine, places=places, **others)
    return Samples.cat(ranks.gather(own))


def score(*arguments: Any) -> RewardResult:
    """Call `rewards.score` on rank 0, and return its result on all ranks.

    Reward functions run on rank 0, and receive the same batch as in a single process.
    """
    return ranks.from_main(lambda: rewards.score(*arguments))


# ------------------------------------------------------------------- Prompts, groups, advantages
class PromptQueue:
    """Endless sequence of training prompts, which cycles through the training set in order.

    A place is an index into this sequence. It is also the number of the prompt's group.

    Args:
        examples: the training set.

    Attributes:
        consumed: number of prompts that were already used, which is also the next place.
    """

    def __init__(self, examples: Sequence[Example]) -> None:
        self.examples = examples
        self.consumed = 0

    def take(self, count: int) -> range:
        """Return the next `count` places (queue positions) and consume them."""
        self.consumed += count
        return range(self.consumed - count, self.consumed)

    def example(self, place: int) -> Example:
        return self.examples[place % len(self.examples)]


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
