"""Recorded rollouts of agents in place of sampled ones: `data.task: traces`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from grpo_fast.data import TRACES, Example, load_traces
from grpo_fast.data.example import need
from grpo_fast.data.traces import Branch, RecordedTrace, check_traces
from grpo_fast.rewards import RewardResult, RewardSet
from grpo_fast.rollout import Engine, Rollout
from grpo_fast.rollout.engine import Kept
from grpo_fast.train.collect.advantages import Advantages
from grpo_fast.train.collect.collector import Collected, Collector
from grpo_fast.train.collect.groups import PromptQueue, difficulties
from grpo_fast.train.config import RunConfig
from grpo_fast.train.metrics.clock import Clock
from grpo_fast.train.metrics.samples import completion_metrics, kept_metrics, reward_metrics
from grpo_fast.train.models.policy import Policy


class RecordedCollector(Collector):
    """The branches of the next tasks' traces as completions, one sample each.

    Advantages are the nodes' own, or those of the rewards of a task's `group_size` traces.
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
            need(len(traces) == size, path, expected, f"{len(traces)} of {task!r}")
            branches = [branch for trace in traces for branch in trace.branches]
            is_scored = all(branch.advantages is not None for branch in branches)
            fits = is_scored or all(trace.reward is not None for trace in traces)
            expected = "a reward for each trace, or advantages in its nodes"
            need(fits, path, expected, f"neither in {task!r}")
            need(branches, path, f"a sampled token in {task!r}", "none")

    def next(self, step: int, clock: Clock) -> Collected:
        asked = self.queue.take(self.config.prompts_per_step)
        traces = [trace for one in asked for trace in self.traces[str(one.example.prompt)]]
        rewards = torch.tensor([torch.nan if t.reward is None else t.reward for t in traces])
        scores = RewardResult(rewards, {}, {})
        lengths = [sum(len(branch.logps) for branch in trace.branches) for trace in traces]
        advantages = self.advantages.of(scores, lengths)
        self.advantages.observe(rewards)
        owner = [n for n, trace in enumerate(traces) for _ in trace.branches]
        branches = [branch for trace in traces for branch in trace.branches]
        rollout = self._rollout([traces[n].task for n in owner], branches)
        judged = rewards.view(len(asked), -1)
        metrics = {
            **reward_metrics(scores, self.config.group_size),
            **completion_metrics(rollout), **kept_metrics(rollout),
        }  # fmt: skip
        clock.lap("rollout")
        records = difficulties(asked, judged, ["kept"] * len(asked), step)
        own = [b.advantages.mean() if b.advantages is not None else advantages[n]
               for n, b in zip(owner, branches, strict=True)]  # fmt: skip
        scores = RewardResult(rewards[owner], {}, {})
        return Collected(rollout, scores, torch.stack(own), metrics, 0, records)

    def examples_of(self, collected: Collected) -> list[Example]:
        every = [self.queue.examples[one.prompt] for one in collected.prompts]
        return [one for one in every for t in self.traces[str(one.prompt)] for _ in t.branches]

    def _rollout(self, names: list[str], branches: list[Branch]) -> Rollout:
        places = [branch.trained.nonzero()[:, 0].tolist() for branch in branches]
        ids = [branch.ids.tolist() for branch in branches]
        completions = [[x[i] for i in at] for x, at in zip(ids, places, strict=True)]
        rollout = Rollout(
            prompts=names, prompt_ids=ids, completion_ids=completions, trained=list(places),
            sampling_logps=[branch.logps for branch in branches],
            texts=self.policy.tokenizer.batch_decode(completions, skip_special_tokens=True),
            truncated=[False] * len(branches), kept=[_kept(branch.kept) for branch in branches],
            credit=[branch.advantages for branch in branches],
        )  # fmt: skip
        rollout.check(self.policy.lm.get_input_embeddings().weight.shape[0])
        return rollout


def build_collector(
    config: RunConfig, policy: Policy, engine: Engine, rewards: RewardSet, queue: PromptQueue
) -> Collector:
    """The collector of a run: it samples, or takes what `data.task: traces` has recorded."""
    size, weights = config.rollout.group_size, {r.name: r.weight for r in rewards.rewards}
    advantages = Advantages(config.advantages, config.advantage_options, size, weights)
    of_run = config.rollout, policy, engine, rewards, queue, advantages, config.seed, config.steps
    if config.data.task == TRACES:
        return RecordedCollector(str(config.data.path), *of_run)
    return Collector(*of_run)


def _kept(sets: tuple[Tensor, Tensor] | None) -> Kept | None:
    if sets is None:
        return None
    return Kept(sets[0], torch.nn.functional.pad(sets[1].cumsum(0), (1, 0)))
