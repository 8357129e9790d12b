"""The next step's completions, sampled with the weights from before this step's updates.

The prompt queue moves on only when a step takes them. An engine that is apart samples in a thread
while the policy is trained; others before that.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from grpo_fast.data import reason
from grpo_fast.rollout import Engine, Rollout, awake
from grpo_fast.train.collect.groups import PromptQueue
from grpo_fast.train.config import RolloutConfig
from grpo_fast.train.metrics.clock import Clock
from grpo_fast.train.models.policy import Policy
from grpo_fast.train.ranks import distributed, rollouts

log = logging.getLogger(__name__)


@dataclass
class Sampled:
    rollout: Rollout
    seconds: float


@dataclass
class Ahead:
    """At most one rollout, of the step after the one that a run is in."""

    config: RolloutConfig
    policy: Policy
    engine: Engine
    queue: PromptQueue
    seed: int
    steps: int
    sampled: Sampled | None = None
    coming: Future[Sampled] | None = None

    def __post_init__(self) -> None:
        self.threads = ThreadPoolExecutor(1, "rollout.ahead")

    def begin(self, step: int, clock: Clock) -> None:
        """Sample for the step after this one, where the run samples ahead and has not done it."""
        is_wanted = self.config.ahead and step < self.steps
        if not is_wanted or self.sampled is not None or self.coming is not None:
            return
        prompts = [one.example.prompt for one in self.queue.next(self.config.prompts_per_step)]

        def sample(generate: Callable[..., Rollout]) -> Sampled:
            start = time.perf_counter()
            rollout = generate(
                self.policy, prompts, self.config, group_size=self.config.group_size,
                seed=(self.seed, step + 1), engine=self.engine,
            )  # fmt: skip
            return Sampled(rollout, time.perf_counter() - start)

        with awake(self.engine, self.policy, version=step - 1):
            if self.engine.is_apart:
                self.coming = self.threads.submit(sample, rollouts.generate_share)
            else:
                self.sampled = sample(rollouts.generate)
        clock.lap("ahead")

    def settle(self, clock: Clock) -> None:
        """Wait for what is being sampled, on all ranks; its error is raised here."""
        coming, self.coming = self.coming, None
        if coming is None:
            return
        with distributed.together():
            own = coming.result()
        rollout = rollouts.join_ranks(own.rollout, self.config.group_size)
        self.sampled = Sampled(rollout, own.seconds)
        clock.lap("ahead")

    def rollout(self, clock: Clock) -> Rollout | None:
        """The rollout of the step that begins, if there is one; its seconds count there.

        It stays until `done`: a step that is left before it has all its completions begins again.
        """
        if self.sampled is None:
            return None
        clock.seconds["rollout"] = self.sampled.seconds
        return self.sampled.rollout

    def done(self) -> None:
        self.sampled = None

    def state_dict(self) -> Sampled | None:
        """The rollout for a checkpoint. One that fails is sampled again."""
        try:
            self.settle(Clock())
        except Exception as error:
            log.warning("the next step's completions are not in the checkpoint: %s", reason(error))
        return self.sampled
