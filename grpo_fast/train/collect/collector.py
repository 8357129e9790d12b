"""The collector, which provides the samples of each step with their rewards and advantages."""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from grpo_fast.data import Example
from grpo_fast.errors import require
from grpo_fast.rewards import RewardSet
from grpo_fast.rollout import Engine, Samples, awake, prompt_texts
from grpo_fast.rollout.completions import decoded
from grpo_fast.rollout.threads import started
from grpo_fast.train.collect.advantages import Advantages, token_rewards
from grpo_fast.train.collect.groups import PromptQueue, used_groups
from grpo_fast.train.config import RolloutConfig
from grpo_fast.train.config.run import GAE
from grpo_fast.train.metrics.clock import Clock
from grpo_fast.train.metrics.samples import (
    completion_metrics,
    reward_metrics,
    staleness,
    support_metrics,
)
from grpo_fast.train.models.policy import Policy
from grpo_fast.train.ranks import distributed
from grpo_fast.train.ranks.rollouts import generate, generate_share, join_ranks, score

log = logging.getLogger(__name__)

WATCHED_STEPS = 5  # number of steps in a row after which a warning about equal rewards is logged

Collected = tuple[Samples, dict[str, float]]  # samples of a step, and its metrics


@dataclass
class Collector:
    """Collector that samples completions, scores them and computes their advantages.

    With `rollout.ahead`, the completions of the next step are sampled with the weights from before
    the current step's updates. An engine on a separate device samples them in a thread during
    training. Any other engine samples them before the updates of the current step begin.
    """

    config: RolloutConfig
    policy: Policy
    engine: Engine
    rewards: RewardSet
    queue: PromptQueue
    advantages: Advantages
    seed: int  # seed of the run
    steps: int  # steps of the run
    sampled: Samples | None = None  # unscored samples of the next step
    seconds: float = math.nan  # time that sampling them took; NaN if a checkpoint provided them
    logged: dict[str, list[float]] = field(default_factory=dict)  # values logged by rewards
    steps_without_spread: int = 0  # latest steps in which most groups had equal rewards
    coming: Future[tuple[Samples | None, float]] | None = None  # result of the sampling thread

    def next(self, step: int, clock: Clock) -> Collected:
        """Return the samples of a step.

        With `rollout.dynamic`, groups with equal rewards are replaced with groups from the next
        prompts. If groups are still missing after `rollout.dynamic.rounds` rounds of replacement,
        groups with equal rewards complete the batch.

        Args:
            step: number of the step, counted from 1.
            clock: clock that measures the time of each part of the step.

        Returns:
            The samples and the metrics of the step.
        """
        dynamic = self.config.dynamic
        wanted = self.config.prompts_per_step
        ahead = self.sampled
        self.sampled = None
        metrics: dict[str, float] = {}
        self.logged = {}
        is_used = torch.ones(wanted, dtype=torch.bool)  # one entry per group
        # 1. Sample and score the prompts of the step. Skip sampling if it was done ahead.
        if ahead is not None:
            clock.seconds["rollout"] = self.seconds
        is_idle = ahead is not None and dynamic is None
        with nullcontext() if is_idle else awake(self.engine, self.policy, version=step - 1):
            places = self.queue.take(wanted)
            samples, lost = self._scored(places, (self.seed, step), clock, ahead)
            # 2. Replace groups whose rewards are all equal with groups from the next prompts.
            if dynamic is not None:
                rounds = 0
                is_used, filled = used_groups(self._judged(samples), wanted)
                while filled and rounds < dynamic.rounds:
                    rounds += 1
                    # Include the queue position in the seed, so that each round draws new random
                    # numbers.
                    seed = (self.seed, step, self.queue.consumed)
                    places = self.queue.take(filled)
                    more, also_lost = self._scored(places, seed, clock)
                    samples = Samples.cat([samples, more])
                    lost = {name: lost[name] + also_lost[name] for name in lost}
                    is_used, filled = used_groups(self._judged(samples), wanted)
                metrics = {
                    "dynamic_sampling/asked": float(len(is_used)),
                    "dynamic_sampling/dropped": float((~is_used).sum()),
                    "dynamic_sampling/filled": float(filled),
                    "dynamic_sampling/rounds": float(rounds),
                    "prompts_consumed": float(self.queue.consumed),
                }
        # 3. Compute the advantages of the groups that are used.
        size = self.config.group_size
        chosen = samples[is_used.repeat_interleave(size).nonzero()[:, 0]]
        assert chosen.rewards is not None and samples.rewards is not None
        chosen.advantages = self.advantages.of(chosen.rewards, chosen.scores, chosen.lengths)
        self.advantages.observe(samples.rewards)
        # 4. Compute metrics over all samples, including those of dropped groups.
        with distributed.together():  # so that all ranks can save the run if a sample is too old
            ages = staleness(samples, step, most=self.config.ahead)
        metrics = {
            **{f"logged/{name}": math.fsum(x) / len(x) for name, x in self.logged.items()},
            **reward_metrics(samples.rewards, samples.scores, lost, size),
            **completion_metrics(samples),
            **support_metrics(samples),
            **metrics,
            **ages,
        }
        self._warn_without_spread(metrics["frac_reward_zero_std"])
        return chosen, metrics

    def begin_ahead(self, step: int, clock: Clock) -> None:
        """Sample the completions of the next step if `rollout.ahead` is 1.

        Args:
            step: number of the current step, counted from 1.
            clock: clock that measures the time of the sampling.
        """
        if not self.config.ahead or step == self.steps:
            return
        places = self.queue.next(self.config.prompts_per_step)  # the next step consumes these

        def sample(by: Callable[..., Samples | None]) -> tuple[Samples | None, float]:
            start = time.perf_counter()
            samples = self._sample(by, places, (self.seed, step + 1))
            return samples, time.perf_counter() - start

        with awake(self.engine, self.policy, version=step - 1):
            if self.engine.is_apart:
                self.coming = started(partial(sample, generate_share))
            else:
                self.sampled, self.seconds = sample(generate)
        clock.lap("ahead")

    def settle_ahead(self, clock: Clock) -> None:
        """Wait for the samples that `begin_ahead` draws in a thread.

        All ranks must call this method. If the thread failed on any rank, all ranks raise its
        error.
        """
        coming = self.coming
        self.coming = None
        if coming is None:
            return
        with distributed.together():
            own, self.seconds = coming.result()
        self.sampled = join_ranks(own)
        clock.lap("ahead")

    def examples_of(self, samples: Samples) -> list[Example]:
        """Return the training example that each sample belongs to."""
        return [self.queue.example(place) for place in samples.group.tolist()]

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint. It does not include samples that were drawn ahead."""
        return {
            "consumed": self.queue.consumed,
            "lost_rewards": self.rewards.state_dict(),
            "baseline": self.advantages.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.queue.consumed = state["consumed"]
        self.rewards.load_state_dict(state["lost_rewards"])
        self.advantages.load_state_dict(state["baseline"])

    def take_ahead(self, samples: Samples | None) -> None:
        """Restore the samples of the next step from a checkpoint.

        Args:
            samples: the samples that were drawn ahead, or None if the checkpoint has none.

        Raises:
            ValueError: the samples do not belong to the next prompts.
        """
        if samples is not None:
            samples.check(self.policy.head.weight.shape[0])
            places = torch.tensor(self.queue.next(self.config.prompts_per_step))
            fits = torch.equal(samples.group, places.repeat_interleave(self.config.group_size))
            expected = f"samples of the prompts {int(places[0])} to {int(places[-1])}"
            require(fits, "ahead.group", expected, samples.group.tolist()[:8])
            samples.texts = decoded(self.policy.tokenizer, samples.completion_ids)
        self.sampled = samples

    def _sample(
        self, by: Callable[..., Samples | None], places: range, seed: tuple[int, ...]
    ) -> Samples | None:
        """Sample completions for the prompts at the queue positions `places`.

        The function `by` draws the samples. It is `generate` or `generate_share`. The group number
        of a sample is the queue position of its prompt.
        """
        prompts = [self.queue.example(place).prompt for place in places]
        options: dict[str, Any] = {"group_size": self.config.group_size, "seed": seed}
        samples = by(self.policy, prompts, self.config, engine=self.engine, **options)
        if samples is not None:
            samples.group += places.start
        return samples

    def _scored(
        self, places: range, seed: tuple[int, ...], clock: Clock, samples: Samples | None = None
    ) -> tuple[Samples, dict[str, Counter[str]]]:
        """Score completions of the prompts at the queue positions `places`.

        If `samples` is None, the completions are sampled first.

        Returns:
            The samples, and for each reward function the number of samples without a reward, by
            reason.
        """
        # 1. Sample, unless the caller passed samples.
        if samples is None:
            samples = self._sample(generate, places, seed)
        assert samples is not None
        clock.lap("rollout", tokens=sum(samples.lengths))
        examples = self.examples_of(samples)
        # Render the chat template once per group, because all samples of a group share the prompt.
        size = self.config.group_size
        texts = prompt_texts(self.policy, [example.prompt for example in examples[::size]])
        sent = [text for text in texts for _ in range(size)]
        # 2. Call the reward functions.
        done = seed[1] - 1
        epoch = done * self.config.prompts_per_step / len(self.queue.examples)
        self.rewards.progress |= {"global_step": done, "max_steps": self.steps, "epoch": epoch}
        result = score(self.rewards, examples, samples.texts, samples.completion_ids, sent)
        # 3. Store the rewards and the values that the functions logged.
        samples.rewards = result.total
        samples.scores = result.per_fn
        samples.extra = dict(result.extra)
        for name, values in result.metrics.items():
            self.logged.setdefault(name, []).extend(values)
        if self.advantages.mode == GAE:
            samples.token_rewards = token_rewards(result, samples)
        clock.lap("reward")
        return samples, result.reasons

    def _judged(self, samples: Samples) -> Tensor:
        """Return the rewards that decide which groups are kept, shape (groups, G).

        A group may be dropped if these rewards are all equal. They are the total rewards, or the
        rewards of the function `rollout.dynamic.judged_by` if it is set.
        """
        judge = self.config.dynamic and self.config.dynamic.judged_by
        judged = samples.scores[judge] if judge else samples.rewards
        return judged.view(-1, self.config.group_size)

    def _warn_without_spread(self, fraction: float) -> None:
        """Log a warning if most groups had equal rewards in each of the last WATCHED_STEPS steps.

        Args:
            fraction: fraction of this step's groups in which all rewards are equal.
        """
        is_counted = fraction > 0.5 and self.config.group_size > 1
        self.steps_without_spread = self.steps_without_spread + 1 if is_counted else 0
        if self.steps_without_spread == WATCHED_STEPS:
            log.warning(
                "most groups of the last %d steps have equal rewards, and nothing is learned from "
                "them: the prompts may be too easy or too hard (rollout.dynamic={} replaces such "
                "groups)", WATCHED_STEPS,
            )  # fmt: skip
