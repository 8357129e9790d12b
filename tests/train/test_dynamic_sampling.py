"""Tests of dynamic sampling."""

import math
from contextlib import nullcontext
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch

from grpo_fast.data import Example
from grpo_fast.rewards import RewardSet, WeightedReward
from grpo_fast.rollout import Samples
from grpo_fast.train import collect as module
from grpo_fast.train.collect import Advantages, Collector, PromptQueue, used_groups
from grpo_fast.train.config import load_recipe
from grpo_fast.train.metrics import Clock
from tests.train.tiny_steps import table_of

NAN = math.nan


def configured(*words):
    return load_recipe("sort", ["rollout.group_size=2", "rollout.prompts_per_step=3", *words])


@pytest.fixture
def asked(monkeypatch):
    """Replace `generate` with a function that needs no model, and return the list of its calls.

    A call is recorded as (prompts, seed). The text of completion i of prompt "p" is "p i".
    """
    calls = []

    def generate(policy, prompts, options, *, group_size, seed, engine):
        calls.append((list(prompts), seed))
        names = [f"{prompt} {i}" for prompt in prompts for i in range(group_size)]
        completions = [[2] * (i + 1) for i in range(len(names))]
        samples = table_of([[1]] * len(prompts), completions, texts=names)
        samples.weight_version.fill_(seed[1] - 1)
        return samples

    monkeypatch.setattr(module, "generate", generate)
    monkeypatch.setattr(module, "awake", lambda *_, **__: nullcontext())
    return calls


class Found(NamedTuple):
    samples: Samples
    metrics: dict
    prompts: list
    generated: int


def collector_of(config, policy, rewards, queue):
    size = config.rollout.group_size
    advantages = Advantages(config.advantages, config.advantage_options, size)
    return Collector(
        config.rollout, policy, None, rewards, queue, advantages, config.seed, config.steps
    )


def collected(queue, rewards, config, step=1):
    policy = SimpleNamespace(tokenizer=None, template_kwargs={})  # keeps prompts as texts
    collector, clock = collector_of(config, policy, rewards, queue), Clock()
    samples, metrics = collector.next(step, clock)
    prompts = [example.prompt for example in collector.examples_of(samples)]
    return Found(samples, metrics, prompts, clock.tokens["rollout"])


def by_table(table):
    """Return a reward set that looks up the rewards of a prompt's two completions in `table`.

    Both rewards are 0 for a prompt that is not in the table.
    """

    def total(*, completions):
        return [table.get(c.split()[0], (0, 0))[int(c.split()[1])] for c in completions]

    return RewardSet([WeightedReward("total", 1.0, total)], max_failures=1.0)


def queue_of(count):
    return PromptQueue([Example(f"p{i}", "x", None) for i in range(count)])


# -------------------------------------------------------- Kept, dropped and filled groups of a step
def test_what_becomes_of_each_group():
    rewards = [[0, 1], [1, 1], [NAN, NAN], [1, NAN], [0, 0], [2, -1], [NAN, 0], [3, 4]]
    for wanted, used, filled in ((3, [0, 5, 7], 0), (5, [0, 1, 2, 5, 7], 2)):
        is_used, count = used_groups(torch.tensor(rewards).flatten(), 2, wanted)
        assert is_used.nonzero()[:, 0].tolist() == used and count == filled


def test_dropped_groups_are_refilled_from_the_following_prompts(asked):
    table = {"p1": (0, 1), "p4": (1, 0), "p5": (0, 3)}
    queue = queue_of(9)
    found = collected(queue, by_table(table), configured("rollout.dynamic.rounds=4"), step=7)
    # In round 1, p0 and p2 are dropped and p3 and p4 replace them. In round 2, p3 is dropped and p5
    # replaces it. The group of p5 is kept.
    prompts, seeds = zip(*asked, strict=True)
    assert prompts == (["p0", "p1", "p2"], ["p3", "p4"], ["p5"])
    assert seeds == ((0, 7), (0, 7, 3), (0, 7, 5)) and queue.consumed == 6
    assert found.samples.texts == ["p1 0", "p1 1", "p4 0", "p4 1", "p5 0", "p5 1"]
    assert found.prompts == ["p1", "p1", "p4", "p4", "p5", "p5"]
    assert found.samples.rewards.tolist() == [0, 1, 1, 0, 0, 3]
    advantages = found.samples.advantages
    assert advantages.view(3, 2).sum(1).abs().max() < 1e-6 and advantages.all()
    assert found.samples.lengths == [3, 4, 3, 4, 1, 2] and found.generated == 21 + 10 + 3
    counts = {k: v for k, v in found.metrics.items() if "dynamic" in k or "consumed" in k}
    of_groups = {"asked": 6, "dropped": 3, "filled": 0, "rounds": 2}
    wanted = {f"dynamic_sampling/{name}": count for name, count in of_groups.items()}
    assert counts == wanted | {"prompts_consumed": 6}
    assert found.metrics["reward"] == pytest.approx(5 / 12)  # over all samples
    assert found.metrics["frac_reward_zero_std"] == 1 / 2
    spreads = [0, math.sqrt(1 / 2), 0, 0, math.sqrt(1 / 2), math.sqrt(9 / 2)]
    assert found.metrics["reward_std"] == pytest.approx(sum(spreads) / len(spreads))


def test_what_is_missing_after_the_last_round_is_filled(asked):
    queue = queue_of(4)
    config = configured("rollout.dynamic.rounds=2")
    found = collected(queue, by_table({"p2": (0, 1)}), config)
    prompts, _ = zip(*asked, strict=True)
    # The queue repeats its four prompts, so p0 follows p3.
    assert prompts == (["p0", "p1", "p2"], ["p3", "p0"], ["p1", "p2"])
    assert found.prompts[::2] == ["p0", "p2", "p2"]
    assert found.metrics["dynamic_sampling/filled"] == 1
    assert found.metrics["dynamic_sampling/dropped"] == 4  # of seven groups, three are used


def test_lost_samples_are_counted_whether_their_group_stays_or_not(asked):
    table = {"p0": (NAN, NAN), "p1": (NAN, 1), "p2": (0, 1), "p3": (0, 1), "p4": (2, NAN)}
    queue, config = queue_of(9), configured("rollout.dynamic.rounds=1")
    found = collected(queue, by_table(table), config)
    assert found.metrics["rewards/total/failed/not_a_number"] == 4
