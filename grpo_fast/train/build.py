"""The parts of a run: its start, its inputs, its collector."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from grpo_fast.data import Example, load_examples
from grpo_fast.kernels import route
from grpo_fast.rewards import RewardSet, build_rewards, check_examples
from grpo_fast.rollout import Engine
from grpo_fast.train.collect.advantages import Advantages
from grpo_fast.train.collect.collector import Collector
from grpo_fast.train.collect.prompts import PromptQueue
from grpo_fast.train.config import RunConfig
from grpo_fast.train.config.run import SHARDED
from grpo_fast.train.models.policy import Policy
from grpo_fast.train.ranks import distributed
from grpo_fast.train.runs.fingerprints import check_ranks, check_resumed, fingerprints
from grpo_fast.train.runs.folder import FolderLock
from grpo_fast.train.runs.resume import Start, find_start
from grpo_fast.train.update.warm_start import warm_start

log = logging.getLogger(__name__)


@contextmanager
def entered(config: RunConfig) -> Iterator[Start]:
    """Lock the folder of a run, then look for its start: rank 0 does, for all."""
    with distributed.together():
        is_there = distributed.is_main() and os.path.isdir(config.output_dir)
        lock = FolderLock(config.output_dir) if is_there else None

    def start_of_main() -> list[Any]:
        start = find_start(config, log.warning)
        return [None if start.checkpoint is None else str(start.checkpoint), *start[1:4]]

    try:
        checkpoint, (metrics, prompts), again, prints = distributed.from_main(start_of_main)
        place = None if checkpoint is None else Path(checkpoint)
        yield Start(place, (metrics, prompts), again, prints, lock)
    finally:
        if lock is not None:
            lock.release()


def load_inputs(
    config: RunConfig, start: Start
) -> tuple[RewardSet, Sequence[Example], dict[str, str]]:
    """Rewards, the training set, and the fingerprints of all that a run depends on.

    Raises ValueError where a rank, or the checkpoint of the start, has others.
    """
    with distributed.together():
        rewards = build_rewards(config.rewards, max_failures=config.max_reward_failures)
        plain = config.data.model_copy(update={"shots_tokens": None})
        questions = load_examples(plain, split="train", seed=config.seed)
        # Of examples that are made when asked for, all alike, the first is checked.
        known = questions if isinstance(questions, list) else questions[:1]
        check_examples(rewards, known, "training")
        prints = fingerprints(config, questions)
    check_ranks(config, prints)
    if start.checkpoint is not None:
        for name in check_resumed(start.fingerprints, prints, config.resume_allow):
            log.warning("the run goes on with another %s than it began with", name)
    return rewards, questions, prints


def kernels_of(policy: Policy) -> dict[str, Any]:
    """The backend of the head, and why it is not a faster one."""
    return {
        "backend": route.head_route("auto", policy.head.weight).backend,
        "backend_fallback": route.fallback_reason(policy.device.type),
    }


def build_collector(
    config: RunConfig, policy: Policy, engine: Engine, rewards: RewardSet, queue: PromptQueue
) -> Collector:
    """The collector of a run."""
    group_size = config.rollout.group_size
    weights = {reward.name: reward.weight for reward in rewards.rewards}
    advantages = Advantages(config.advantages, config.advantage_options, group_size, weights)
    return Collector(
        config.rollout, policy, engine, rewards, queue, advantages,
        seed=config.seed, steps=config.steps,
    )  # fmt: skip


def is_dealt_to(kind: str | None) -> bool:
    """Whether this rank gets its shards from rank 0, which alone has the weights till then."""
    return kind in SHARDED and not distributed.is_main()


def start_warm(
    config: RunConfig, policy: Policy, questions: Sequence[Example], log: Callable[..., Any]
) -> None:
    """Make the warm start: on all ranks, or before weights are dealt out on rank 0 alone."""
    is_dealt = is_dealt_to(config.distributed)  # inside `alone` every rank is the main one
    alone = distributed.alone() if config.distributed in SHARDED else nullcontext()
    with distributed.together(), alone:
        if not is_dealt:
            warm_start(policy, questions, config.warm_start, seed=config.seed, log=log)


def agreement(policy: Policy) -> Callable[[], AbstractContextManager[None]]:
    """How the ranks agree on a signal in a forward pass, where they make that in step."""
    return lambda: distributed.together() if policy.in_step else nullcontext()
