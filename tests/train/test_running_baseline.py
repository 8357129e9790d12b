"""`advantages: baseline`: a constant, or the mean reward of the steps before."""

from __future__ import annotations

import json

import pytest
import torch

from grpo_fast import group_advantages
from grpo_fast.objective.baseline import RunningBaseline, running_baseline
from grpo_fast.train.collect.advantages import Advantages
from tests.train.tiny_runs import sort

RUNNING = ["advantages=baseline", "advantage_options.running=true"]

pytestmark = pytest.mark.usefixtures("no_pictures")


def test_the_mean_of_the_steps_before():
    baseline = RunningBaseline(value=0.25, decay=0.5)
    assert baseline.value == 0.25
    steps = ([1.0, 0.0], [float("nan"), 0.75], [float("nan")] * 2, [2.0, 2.0])
    seen = []
    for rewards in steps:
        baseline.update(torch.tensor(rewards))
        seen.append(baseline.value)
    assert seen == [0.5, 0.625, 0.625, 1.3125]


def test_a_resumed_baseline_goes_on_where_it_stopped():
    one = RunningBaseline(value=3.0)
    for state in (one.state_dict(), None):
        other = RunningBaseline(value=3.0)
        other.load_state_dict(state or json.loads(json.dumps(one.state_dict())))
        assert other.value == one.value
        for baseline in (one, other):
            baseline.update(torch.tensor([0.1, 0.7]))
        assert other.value == one.value and one.value != 3.0


@pytest.fixture
def kept(monkeypatch):
    """(scores, advantages) of every step of runs from here on."""
    found, whole = [], Advantages.of

    def recorded(self, scores, *arguments):
        found.append((scores, whole(self, scores, *arguments)))
        return found[-1][1]

    monkeypatch.setattr(Advantages, "of", recorded)
    return found


def test_a_step_is_measured_by_those_before_it(tmp_path, kept):
    """Advantage = reward − baseline, sample by sample; the first step's is `value`."""
    options = ["advantage_options.value=0.5", "advantage_options.decay=0.75", "steps=4"]
    sort(tmp_path / "a", *RUNNING, *options)
    expected, mean = 0.5, None
    for scores, advantages in kept:
        rewards = scores.total.double()
        torch.testing.assert_close(advantages.double(), rewards - expected, rtol=0, atol=1e-6)
        now = rewards.mean().item()
        expected = mean = now if mean is None else 0.75 * mean + 0.25 * now
    assert len(kept) == 4


def test_gdpo_takes_each_reward_apart(tmp_path, kept):
    """Of the run's own rewards, by their weights."""
    options = ["advantages=gdpo", "steps=2", "advantage_options.clip_high=1.5"]
    weighed = ["rewards.0.weight=2", "rewards.1.weight=0.5"]
    sort(tmp_path / "a", *options, *weighed)
    assert len(kept) == 2
    for scores, found in kept:
        listed, bounds = torch.stack(list(scores.per_fn.values())), {"clip_high": 1.5}
        expected = group_advantages(listed, "gdpo", group_size=4, weights=[2.0, 0.5], **bounds)
        assert torch.equal(found, expected) and found.any()


def test_running_false_is_the_constant():
    assert running_baseline("baseline", {"running": False, "value": 1.0}) is None
    assert running_baseline("baseline", {"value": 1.0}) is None
    assert running_baseline("baseline", {}).value == 0.0  # no constant: a running one
    assert running_baseline("centered", {}) is None
