"""The next step's completions, sampled with the weights from before this step's updates.

They are those of the next prompts of the queue, which moves on only when a step takes them. An
engine that is apart samples them in a thread while the policy is trained; others before that.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

from grpo_fast.data import reason
from grpo_fast.rollout import Engine, Rollout, awake, stored
from grpo_fast.train.collect.prompts import PromptQueue
from grpo_fast.train.config import RunConfig
from grpo_fast.train.metrics.losses import Clock
from grpo_fast.train.models.policy import Policy
from grpo_fast.train.ranks import distributed, rollouts

log = logging.getLogger(__name__)


class Sampled(NamedTuple):
    """A rollout, and the seconds that it took."""

    rollout: Rollout
    seconds: float


class Ahead:
    """At most one rollout, of the step after the one that a run is in."""

    def __init__(self, config: RunConfig, policy: Policy, engine: Engine) -> None:
        self.config, self.policy, self.engine = config, policy, engine
        self.found: Sampled | None = None
        self.coming: Future[Sampled] | None = None
        self.threads = ThreadPoolExecutor(1, "rollout.ahead")

    def begin(self, step: int, queue: PromptQueue, clock: Clock) -> None:
        """Sample for the step after this one, where that is asked for and not done.

        With the weights as they are: those that this step began with.
        """
        asked = self.config.rollout.ahead and step < self.config.steps
        if not asked or self.found is not None or self.coming is not None:
            return
        prompts = [one.example.prompt for one in queue.next(self.config.rollout.prompts_per_step)]

        def sample(generate: Callable[..., Rollout]) -> Sampled:
            rollout, start = self.config.rollout, time.perf_counter()
            found = generate(
                self.policy, prompts, rollout, group_size=rollout.group_size,
                seed=(self.config.seed, step + 1), engine=self.engine,
            )  # fmt: skip
            return Sampled(found, time.perf_counter() - start)

        with awake(self.engine, self.policy, version=step - 1):
            if self.engine.is_apart:
                self.coming = self.threads.submit(sample, rollouts.generate_share)
            else:
                self.found = sample(rollouts.generate)
        clock.lap("ahead")

    def settle(self, clock: Clock) -> None:
        """Wait for what is being sampled, on all ranks; its error is raised here."""
        coming, self.coming = self.coming, None
        if coming is None:
            return
        with distributed.together():
            own = coming.result()
        rollout = rollouts.joined(own.rollout, self.config.rollout.group_size)
        self.found = own._replace(rollout=rollout)
        clock.lap("ahead")

    def rollout(self, clock: Clock) -> Rollout | None:
        """That of the step that begins, if there is one; its seconds count there.

        It stays until the step calls `done`: one that is left before it has all its completions
        begins again.
        """
        if self.found is None:
            return None
        clock.seconds["rollout"] = self.found.seconds
        return self.found.rollout

    def done(self) -> None:
        """The step has taken over what there was."""
        self.found = None

    def state(self) -> tuple[dict[str, Any] | None, stored.Tensors]:
        """What is there, for a checkpoint. What fails now is sampled again from there."""
        try:
            self.settle(Clock())
        except Exception as error:
            log.warning("the next step's completions are not in the checkpoint: %s", reason(error))
        if self.found is None:
            return None, {}
        lists, tensors = stored.store(self.found.rollout)
        return {"rollout": lists, "seconds": self.found.seconds}, tensors

    def load(self, state: dict[str, Any], tensors: stored.Tensors) -> None:
        self.found = Sampled(stored.restore(state["rollout"], tensors), state["seconds"])
