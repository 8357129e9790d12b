"""The parts of a run: its inputs, its collector, its warm start."""

from __future__ import annotations

import logging
from typing import Any

from grpo_fast.data import TRACES
from grpo_fast.data.splits import Splits
from grpo_fast.kernels import route
from grpo_fast.rewards import RewardSet, build_rewards, check_examples
from grpo_fast.rollout import Engine
from grpo_fast.train.collect.advantages import Advantages
from grpo_fast.train.collect.collector import Collector
from grpo_fast.train.collect.groups import PromptQueue
from grpo_fast.train.collect.recorded import RecordedCollector
from grpo_fast.train.config import RunConfig
from grpo_fast.train.models.policy import Policy
from grpo_fast.train.ranks import distributed
from grpo_fast.train.runs.fingerprints import check_ranks, check_resumed, fingerprints
from grpo_fast.train.runs.resume import Start

log = logging.getLogger(__name__)


def load_inputs(config: RunConfig, start: Start) -> tuple[RewardSet, Splits, dict[str, str]]:
    """Rewards, data, and the fingerprints of all that a run depends on, which are checked."""
    with distributed.together():
        rewards = build_rewards(config.rewards, max_failures=config.max_reward_failures)
        splits = Splits(config.data, config.seed)
        check_examples(rewards, splits.listed, "training")
        prints = splits.fingerprints() | fingerprints(config)
    check_ranks(config, prints)
    if start.checkpoint is not None:
        for name in check_resumed(start.fingerprints, prints, config.resume_allow):
            log.warning("the run goes on with another %s than it began with", name)
    return rewards, splits, prints


def kernels_of(policy: Policy) -> dict[str, Any]:
    return {
        "backend": route.head_route("auto", policy.head.weight).backend,
        "backend_fallback": route.fallback_reason(policy.device.type),
    }


def build_collector(
    config: RunConfig, policy: Policy, engine: Engine, rewards: RewardSet, queue: PromptQueue
) -> Collector:
    group_size = config.rollout.group_size
    weights = {reward.name: reward.weight for reward in rewards.rewards}
    advantages = Advantages(config.advantages, config.advantage_options, group_size, weights)
    of_run = config.rollout, policy, engine, rewards, queue, advantages
    if config.data.task == TRACES:
        path = str(config.data.path)
        return RecordedCollector(path, *of_run, seed=config.seed, steps=config.steps)
    return Collector(*of_run, seed=config.seed, steps=config.steps)
