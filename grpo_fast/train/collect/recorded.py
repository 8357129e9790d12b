"""Collector of recorded agent rollouts, which `data.task: traces` uses instead of sampling."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from grpo_fast import Support
from grpo_fast.data import TRACES, load_traces
from grpo_fast.data.traces import Branch, RecordedTrace, check_traces
from grpo_fast.errors import require
from grpo_fast.rewards import RewardSet
from grpo_fast.rollout import Engine, Samples
from grpo_fast.rollout.completions import decoded
from grpo_fast.train.collect.advantages import Advantages
from grpo_fast.train.collect.collector import Collected, Collector
from grpo_fast.train.collect.groups import PromptQueue
from grpo_fast.train.config import RunConfig
from grpo_fast.train.metrics.clock import Clock
from grpo_fast.train.metrics.samples import completion_metrics, reward_metrics, support_metrics
from grpo_fast.train.models.policy import Policy


class RecordedCollector(Collector):
    """Collector that returns recorded traces as samples, with one sample per branch of a trace.

    If the nodes of a trace contain advantages, these advantages are used. Otherwise advantages are
    computed from the rewards of all `group_size` traces of the same task.

    Args:
        path: path of the file with the traces.
        args, options: arguments of `Collector`.

    Raises:
        ValueError: a trace does not fit the model, or the number of traces of a task differs from
            `group_size`.
    """

    def __init__(self, path: str, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.traces: dict[str, list[RecordedTrace]] = {}
        recorded = load_traces(path)
        rows = self.policy.lm.get_input_embeddings().weight.shape[0]
        check_traces(recorded, path, rows, self.policy.positions)
        for trace in recorded:
            self.traces.setdefault(trace.task, []).append(trace)
        size = self.config.group_size
        for task, traces in self.traces.items():
            expected = f"{size} traces of each task (rollout.group_size)"
            require(len(traces) == size, path, expected, f"{len(traces)} of {task!r}")
            branches = [branch for trace in traces for branch in trace.branches]
            is_scored = all(branch.advantages is not None for branch in branches)
            fits = is_scored or all(trace.reward is not None for trace in traces)
            expected = "a reward for each trace, or advantages in its nodes"
            require(fits, path, expected, f"neither in {task!r}")
            require(branches, path, f"a sampled token in {task!r}", "none")

    def next(self, step: int, clock: Clock) -> Collected:
        # 1. Compute the advantages of the next traces.
        places = self.queue.take(self.config.prompts_per_step)
        tasks = [str(self.queue.example(place).prompt) for place in places]
        traces = [trace for task in tasks for trace in self.traces[task]]
        rewards = torch.tensor([torch.nan if t.reward is None else t.reward for t in traces])
        lengths = [sum(len(branch.logps) for branch in trace.branches) for trace in traces]
        advantages = self.advantages.of(rewards, {}, lengths)
        self.advantages.observe(rewards)
        # 2. Build a sample for each branch, with the reward and the advantage of its trace.
        owner = [n for n, trace in enumerate(traces) for _ in trace.branches]
        branches = [branch for trace in traces for branch in trace.branches]
        groups = [places[n // self.config.group_size] for n in owner]
        samples = samples_of(branches, groups, advantages[owner])
        samples.rewards = rewards[owner]
        samples.check(self.policy.lm.get_input_embeddings().weight.shape[0])
        samples.texts = decoded(self.policy.tokenizer, samples.completion_ids)
        clock.lap("rollout")
        # 3. Compute the metrics. Each trace counts once, even if it has several branches.
        metrics = {
            **reward_metrics(rewards, {}, {}, self.config.group_size),
            **completion_metrics(samples),
            **support_metrics(samples),
        }
        return samples, metrics


def samples_of(branches: Sequence[Branch], groups: Sequence[int], advantages: Tensor) -> Samples:
    """Convert recorded branches to samples.

    Args:
        branches: the recorded branches.
        groups: group number of each branch.
        advantages: advantage of each branch. It is not used for a branch with recorded advantages.
    """
    counts = [len(branch.logps) for branch in branches]
    credit = [branch.advantages for branch in branches]
    own = [x if c is None else c.mean() for c, x in zip(credit, advantages, strict=True)]
    # Recorded advantages are per token. If any branch has them, expand the advantages of all other
    # branches to one value per token, because the loss reads a single column.
    by_token = None
    if any(one is not None for one in credit):
        by_token = torch.cat([
            x.nan_to_num(nan=0.0).float().expand(n) if c is None else c
            for c, x, n in zip(credit, own, counts, strict=True)
        ])  # fmt: skip
    lengths = torch.tensor([len(branch.ids) for branch in branches])
    return Samples(
        ids=torch.cat([branch.ids for branch in branches]),
        segment=torch.cat([branch.trained for branch in branches]).to(torch.uint8),
        cu_seqlens=pad(lengths.cumsum(0), (1, 0)),
        group=torch.tensor(groups),
        truncated=torch.zeros(len(branches), dtype=torch.bool),
        weight_version=torch.zeros(len(branches), dtype=torch.int64),
        logps=torch.cat([branch.logps for branch in branches]),
        support=Support.join([branch.support for branch in branches], counts, "cpu"),
        advantages=torch.stack(own),
        token_advantages=by_token,
    )


def build_collector(
    config: RunConfig, policy: Policy, engine: Engine, rewards: RewardSet, queue: PromptQueue
) -> Collector:
    """Return the collector of a run: `RecordedCollector` for data.task=traces, else `Collector`."""
    size = config.rollout.group_size
    weights = {reward.name: reward.weight for reward in rewards.rewards}
    advantages = Advantages(config.advantages, config.advantage_options, size, weights)
    of_run = (
        config.rollout, policy, engine, rewards, queue, advantages, config.seed, config.steps
    )  # fmt: skip
    if config.data.task == TRACES:
        return RecordedCollector(str(config.data.path), *of_run)
    return Collector(*of_run)
