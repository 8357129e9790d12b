"""Collection of the samples of a step: prompts, completions, rewards and advantages.

With several ranks, each rank samples completions for its share of the prompts, and rank 0 scores
all completions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from grpo_fast import group_advantages, rewards, rollout
from grpo_fast.data import Example
from grpo_fast.objective.advantages import Options, split_options
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
from grpo_fast.train.policy import Policy


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

        With `rollout.dynamic`, groups with equal rewards are replaced with groups from the next
        prompts. If groups are still missing after `rollout.dynamic.rounds` rounds of replacement,
        groups with equal rewards complete the batch.

        Args:
            step: number of the step, counted from 1.
            clock: clock that measures the time of each part of the step.
        """
        dynamic = self.config.dynamic
        wanted = self.config.prompts_per_step
        size = self.config.group_size
        metrics: dict[str, float] = {}
        is_used = torch.ones(wanted, dtype=torch.bool)  # one entry per group
        with awake(self.engine, self.policy, version=step - 1):
            # 1. Sample and score the prompts of the step.
            samples, lost = self._scored(self.queue.take(wanted), (self.seed, step), clock)
            # 2. Replace groups whose rewards are all equal with groups from the next prompts.
            if dynamic is not None:
                rounds = 0
                is_used, filled = used_groups(samples.rewards, size, wanted)
                while filled and rounds < dynamic.rounds:
                    rounds += 1
                    # Include the queue position in the seed, so that each round draws new random
                    # numbers.
                    seed = (self.seed, step, self.queue.consumed)
                    more, also_lost = self._scored(self.queue.take(filled), seed, clock)
                    samples = Samples.cat([samples, more])
                    lost = {name: lost[name] + also_lost[name] for name in lost}
                    is_used, filled = used_groups(samples.rewards, size, wanted)
                metrics = {
                    "dynamic_sampling/asked": float(len(is_used)),
                    "dynamic_sampling/dropped": float((~is_used).sum()),
                    "dynamic_sampling/filled": float(filled),
                    "dynamic_sampling/rounds": float(rounds),
                    "prompts_consumed": float(self.queue.consumed),
                }
        check_versions(samples, step)
        # 3. Compute the advantages of the groups that are used.
        chosen = samples[is_used.repeat_interleave(size).nonzero()[:, 0]]
        assert chosen.rewards is not None and samples.rewards is not None
        chosen.advantages = self.advantages.of(chosen.rewards, chosen.lengths)
        # Update the baseline now, so that the advantages of a step see only earlier rewards.
        baseline = self.advantages.baseline
        if baseline is not None:
            baseline.update(samples.rewards)
        # 4. Compute metrics over all samples, including those of dropped groups.
        return chosen, {
            **reward_metrics(samples.rewards, samples.scores, lost, size),
            **completion_metrics(samples),
            **support_metrics(samples),
            **metrics,
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
            "baseline": None if baseline is None else {"mean": baseline.mean},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.queue.consumed = state["consumed"]
        self.rewards.load_state_dict(state["lost_rewards"])
        if self.advantages.baseline is not None and state["baseline"] is not None:
            self.advantages.baseline.mean = state["baseline"]["mean"]

    def _scored(
        self, places: range, seed: tuple[int, ...], clock: Clock
    ) -> tuple[Samples, dict[str, Counter[str]]]:
        """Sample and score completions of the prompts at the queue positions `places`.

        The group number of a sample is the queue position of its prompt.

        Returns:
            The samples, and for each reward function the number of samples without a reward, by
            reason.
        """
        # 1. Sample completions.
        size = self.config.group_size
        prompts = [self.queue.example(place).prompt for place in places]
        samples = generate(
            self.policy, prompts, self.config, engine=self.engine, group_size=size, seed=seed
        )
        samples.group += places.start
        clock.lap("rollout", tokens=sum(samples.lengths))
        # Render the chat template once per group, because all samples of a group share the prompt.
        sent = [text for text in prompt_texts(self.policy, prompts) for _ in range(size)]
        # 2. Call the reward functions.
        done = seed[1] - 1
        epoch = done * self.config.prompts_per_step / len(self.queue.examples)
        self.rewards.progress |= {"global_step": done, "max_steps": self.steps, "epoch": epoch}
        examples = self.examples_of(samples)
        result = score(self.rewards, examples, samples.texts, samples.completion_ids, sent)
        # 3. Store the rewards.
        samples.rewards = result.total
        samples.scores = result.per_fn
        clock.lap("reward")
        return samples, result.reasons


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


def used_groups(rewards: Tensor | None, size: int, wanted: int) -> tuple[Tensor, int]:
    """Choose the groups that a step uses.

    A group is used if its rewards are not all equal. If these are fewer than `wanted` groups, the
    first groups with equal rewards complete the batch. All other groups are dropped.

    Args:
        rewards: rewards of shape (groups·G,). NaN marks samples without a reward, which are
            ignored.
        size: number of samples in a group (G).
        wanted: number of groups that the step uses.

    Returns:
        A mask of the used groups, and the number of used groups with equal rewards.
    """
    assert rewards is not None
    judged = rewards.view(-1, size)
    # If no sample of a group has a reward, the minimum is +inf and the maximum is -inf. The group
    # then counts as a group with equal rewards.
    low = judged.nan_to_num(nan=torch.inf).amin(1)
    has_spread = judged.nan_to_num(nan=-torch.inf).amax(1) > low
    missing = wanted - int(has_spread.sum())
    is_filled = ~has_spread & ((~has_spread).cumsum(0) <= missing)
    return has_spread | is_filled, int(is_filled.sum())


class Advantages:
    """Advantage computation of a run, with the running baseline that some modes use.

    Args:
        mode: value of the setting `advantages`.
        options: value of the setting `advantage_options`.
        group_size: number of completions per prompt (G).
    """

    def __init__(self, mode: str, options: Options, group_size: int) -> None:
        self.mode = mode
        self.group_size = group_size
        self.options, self.baseline = split_options(mode, options)

    def of(self, rewards: Tensor, lengths: Sequence[int]) -> Tensor:
        """Compute the advantage of each completion.

        Args:
            rewards: weighted sum of the rewards of each completion, shape (N·G,). The completions
                of a prompt are adjacent.
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
        if self.mode == "opo":
            options["lengths"] = torch.tensor(lengths)
        return group_advantages(rewards, self.mode, group_size=self.group_size, **options)
