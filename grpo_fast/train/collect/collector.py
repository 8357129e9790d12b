"""The completions that a step learns from, with their rewards and advantages."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass

from grpo_fast.data import Example, Prompt, reason
from grpo_fast.errors import require
from grpo_fast.rewards import RewardResult, RewardSet
from grpo_fast.rewards.reward_set import RewardsState
from grpo_fast.rollout import Engine, Rollout, awake
from grpo_fast.rollout.saved import Saved
from grpo_fast.train.collect.advantages import Advantages
from grpo_fast.train.collect.groups import (
    Drawn,
    PromptQueue,
    PromptRecord,
    Use,
    difficulties,
    uses_of,
)
from grpo_fast.train.config import RolloutConfig
from grpo_fast.train.config.base import Count
from grpo_fast.train.metrics.clock import Clock
from grpo_fast.train.metrics.samples import completion_metrics, kept_metrics, reward_metrics
from grpo_fast.train.models.policy import Policy
from grpo_fast.train.ranks import distributed
from grpo_fast.train.ranks.rollouts import generate, generate_share, join_ranks, score

log = logging.getLogger(__name__)


@dataclass
class Collected:
    """N·G scored completions, the G of a prompt side by side."""

    rollout: Rollout
    scores: RewardResult
    advantages: Saved  # (N·G,) fp32
    metrics: dict[str, float]  # of all that was sampled, dropped groups included
    generated: Count  # tokens, likewise
    prompts: list[PromptRecord]  # of all that were asked


@dataclass
class CollectorState:
    """The place in the training set, the memory of the rewards, a running baseline."""

    consumed: Count
    rewards: RewardsState
    baseline: dict[str, float | None] | None


@dataclass
class Sampled:
    """The rollout of a step, sampled during the step before, and how long that took."""

    rollout: Rollout
    seconds: float


@dataclass
class Collector:
    """Prompts → G completions each → rewards → advantages.

    With `rollout.ahead` the next step's completions come from the weights from before this step's
    updates. The prompt queue moves on only when a step takes them. An engine that is apart samples
    in a thread while the policy is trained; others before that.
    """

    config: RolloutConfig
    policy: Policy
    engine: Engine  # samples with the weights it was last given
    rewards: RewardSet
    queue: PromptQueue
    advantages: Advantages
    seed: int  # of the run; a step's random numbers follow from it and the step's number
    steps: int  # of the run: nothing is sampled ahead behind the last one

    def __post_init__(self) -> None:
        self.sampled: Sampled | None = None  # for the step after the one that the run is in
        self.coming: Future[Sampled] | None = None  # the same, while a thread samples it
        self.threads = ThreadPoolExecutor(1, "rollout.ahead")

    def next(self, step: int, clock: Clock) -> Collected:
        """The completions of a step, sampled by the weights of the step before or ahead of it.

        With `rollout.dynamic` a group whose rewards are all alike is dropped, and a following
        prompt is asked in its place, for some rounds; the rest is filled with dropped groups.
        """
        ahead = None
        if self.sampled is not None:
            ahead, clock.seconds["rollout"] = self.sampled.rollout, self.sampled.seconds
        is_idle = ahead is not None and self.config.dynamic is None
        with nullcontext() if is_idle else awake(self.engine, self.policy, version=step - 1):
            drawn, uses, metrics = self._draw_groups(step, clock, ahead)
        collected = self._scored(drawn, uses, metrics, step)
        self.sampled = None  # only now: a step that is left before this begins again
        return collected

    def begin_ahead(self, step: int, clock: Clock) -> None:
        """Sample for the step after this one, where the run samples ahead and has not done it."""
        is_wanted = self.config.ahead and step < self.steps
        if not is_wanted or self.sampled is not None or self.coming is not None:
            return
        # Not taken from the queue: they are the next step's, which takes them when it begins.
        prompts = [one.example.prompt for one in self.queue.next(self.config.prompts_per_step)]

        def sample(by: Callable[..., Rollout]) -> Sampled:
            start = time.perf_counter()
            rollout = self._sample(by, prompts, (self.seed, step + 1))
            return Sampled(rollout, time.perf_counter() - start)

        with awake(self.engine, self.policy, version=step - 1):
            if self.engine.is_apart:
                self.coming = self.threads.submit(sample, generate_share)
            else:
                self.sampled = sample(generate)
        clock.lap("ahead")

    def settle_ahead(self, clock: Clock) -> None:
        """Wait for the rollout that a thread samples, and raise its error here. Collective."""
        coming, self.coming = self.coming, None
        if coming is None:
            return
        with distributed.together():
            own = coming.result()
        self.sampled = Sampled(join_ranks(own.rollout, self.config.group_size), own.seconds)
        clock.lap("ahead")

    def examples_of(self, collected: Collected) -> list[Example]:
        """The example of each completion (so each G times). Raises ValueError or IndexError for a
        checkpoint's prompts that are those of other completions.
        """
        numbers = [one.prompt for one in collected.prompts if one.use != "dropped"]
        count, size = len(collected.rollout.texts), self.config.group_size
        fits, expected = len(numbers) * size == count, f"{count // size} prompts that are kept"
        require(fits, "underway.collected.prompts", expected, len(numbers))
        return [self.queue.examples[number] for number in numbers for _ in range(size)]

    def ahead_state(self) -> Sampled | None:
        """The rollout sampled ahead, for a checkpoint. Collective.

        None where it failed: a resumed run samples it again.
        """
        try:
            self.settle_ahead(Clock())
        except Exception as error:
            log.warning("the next step's completions are not in the checkpoint: %s", reason(error))
        return self.sampled

    def state_dict(self) -> CollectorState:
        """The state to go on from, apart from `ahead`."""
        return CollectorState(
            self.queue.consumed, self.rewards.state_dict(), self.advantages.state_dict()
        )

    def load_state_dict(self, state: CollectorState) -> None:
        self.queue.consumed = state.consumed
        self.rewards.load_state_dict(state.rewards)
        self.advantages.load_state_dict(state.baseline)

    def _draw_groups(
        self, step: int, clock: Clock, ahead: Rollout | None
    ) -> tuple[Drawn, list[Use], dict[str, float]]:
        """Sample a step's groups: all of them, the use of each, metrics of dynamic sampling."""
        dynamic, wanted = self.config.dynamic, self.config.prompts_per_step
        drawn = self._draw(wanted, (self.seed, step), clock, ahead)
        if dynamic is None:
            return drawn, ["kept"] * wanted, {}
        uses, rounds = uses_of(drawn.judged(dynamic.judged_by), wanted), 0
        while "filled" in uses and rounds < dynamic.rounds:
            rounds += 1
            # The round's place in the training set tells its random numbers from the others'.
            seed = (self.seed, step, self.queue.consumed)
            drawn = drawn.concat(self._draw(uses.count("filled"), seed, clock))
            uses = uses_of(drawn.judged(dynamic.judged_by), wanted)
        metrics = {
            "dynamic_sampling/asked": float(len(uses)),
            "dynamic_sampling/dropped": float(uses.count("dropped")),
            "dynamic_sampling/filled": float(uses.count("filled")),
            "dynamic_sampling/rounds": float(rounds),
            "prompts_consumed": float(self.queue.consumed),
        }
        return drawn, uses, metrics

    def _draw(
        self, count: int, seed: tuple[int, ...], clock: Clock, ahead: Rollout | None = None
    ) -> Drawn:
        """Sample and score groups of the next `count` prompts; `ahead`: a rollout of them."""
        size, asked = self.config.group_size, self.queue.take(count)
        prompts, rollout = [one.example.prompt for one in asked], ahead
        if rollout is None:
            rollout = self._sample(generate, prompts, seed)
        clock.lap("rollout")
        repeated = [one.example for one in asked for _ in range(size)]
        scores = score(
            self.rewards, repeated, rollout.texts, rollout.completion_ids, rollout.prompts
        )
        clock.lap("reward")
        return Drawn(asked, rollout, scores)

    def _sample(
        self, by: Callable[..., Rollout], prompts: Sequence[Prompt], seed: tuple[int, ...]
    ) -> Rollout:
        size = self.config.group_size
        options = {"group_size": size, "seed": seed, "engine": self.engine}
        return by(self.policy, prompts, self.config, **options)

    def _scored(
        self, drawn: Drawn, uses: list[Use], metrics: dict[str, float], step: int
    ) -> Collected:
        size, dynamic = self.config.group_size, self.config.dynamic
        chosen = drawn.select([i for i, use in enumerate(uses) if use != "dropped"])
        advantages = self.advantages.of(chosen.scores, chosen.rollout.lengths)
        self.advantages.observe(drawn.scores.total)
        judged = drawn.judged(None if dynamic is None else dynamic.judged_by)
        return Collected(
            chosen.rollout,
            chosen.scores,
            advantages,
            {
                **reward_metrics(drawn.scores, size),
                **completion_metrics(drawn.rollout),
                **kept_metrics(drawn.rollout),
                **metrics,
                **staleness(drawn.rollout, step, most=self.config.ahead),
            },
            sum(drawn.rollout.lengths),
            difficulties(drawn.asked, judged, uses, step),
        )


def staleness(rollout: Rollout, step: int, most: int) -> dict[str, float]:
    """`sampling/staleness/…`: how many steps older a completion's weights are than the step's; {}
    with most = 0. Raises RuntimeError where some are older than `most`.
    """
    ages = [step - 1 - version for version in rollout.weight_versions]
    if max(ages, default=0) > most:
        expected = f"expected completions of weights at most {most} steps old (rollout.ahead)"
        raise RuntimeError(f"rollout: {expected} in step {step}, got some of {max(ages)}")
    if most == 0:
        return {}
    return {
        "sampling/staleness/mean": sum(ages) / len(ages),
        "sampling/staleness/max": float(max(ages)),
    }
