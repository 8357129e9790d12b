"""Tests of advantages in a run: the running baseline, GDPO and token rewards."""

import json
import math

import pytest
import torch

from grpo_fast import group_advantages
from grpo_fast.objective.baseline import RunningBaseline, running_baseline
from grpo_fast.rollout import Samples
from grpo_fast.train.collect import Advantages
from grpo_fast.train.critic import token_rewards
from tests.train.tiny_runs import sort
from tests.train.tiny_steps import table_of

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
    assert running_baseline("baseline", {"running": False, "value": 1.0}) is None
    assert running_baseline("baseline", {"value": 1.0}) is None
    # Without a constant the baseline is a running mean.
    assert running_baseline("baseline", {}).value == 0.0
    assert running_baseline("centered", {}) is None
    restored = RunningBaseline(value=0.25, decay=0.5)
    restored.load_state_dict(json.loads(json.dumps(baseline.state_dict())))
    assert restored.value == baseline.value
    for each in (baseline, restored):
        each.update(torch.tensor([0.1, 0.7]))
    assert restored.value == baseline.value != seen[-1]


def test_a_step_is_measured_by_those_before_it(tmp_path, spied):
    """Check that the running baseline of a step is computed only from the rewards of earlier steps.

    In the first step the baseline is the option `value`.
    """
    calls = spied(Advantages, "of")
    options = ["advantage_options.value=0.5", "advantage_options.decay=0.75", "steps=4"]
    sort(tmp_path / "a", *RUNNING, *options)
    expected, mean = 0.5, None
    for call in calls:
        rewards = call.args[1].double()
        torch.testing.assert_close(call.result.double(), rewards - expected, rtol=0, atol=1e-6)
        now = rewards.mean().item()
        expected = mean = now if mean is None else 0.75 * mean + 0.25 * now
    assert len(calls) == 4


def test_gdpo_takes_each_reward_apart(tmp_path, spied):
    """Check that a run with the advantages `gdpo` normalizes each reward function separately.

    The weights of the rewards and the option `clip_high` must be used.
    """
    calls = spied(Advantages, "of")
    options = ["advantages=gdpo", "steps=2", "advantage_options.clip_high=1.5"]
    sort(tmp_path / "a", *options, "rewards.0.weight=2", "rewards.1.weight=0.5")
    assert len(calls) == 2
    for call in calls:
        listed, bounds = torch.stack(list(call.args[2].values())), {"clip_high": 1.5}
        expected = group_advantages(listed, "gdpo", group_size=4, weights=[2.0, 0.5], **bounds)
        assert torch.equal(call.result, expected) and expected.any()


def test_the_reward_belongs_to_the_last_token():
    """Check `token_rewards`. An empty completion has no token for its reward."""
    samples = table_of([[1]], [[7] * n for n in (3, 0, 2)])
    samples.rewards = torch.tensor([1.0, 2.0, math.nan])
    rows = [row.tolist() for row in token_rewards(samples).split(samples.lengths)]
    assert rows[:2] == [[0.0, 0.0, 1.0], []]
    assert rows[2][0] == 0 and math.isnan(rows[2][1])
    assert token_rewards(Samples.cat([samples, samples])[[3]]).tolist() == [0.0, 0.0, 1.0]


# --------------------------------------------------- Reward functions that do not apply to a sample
def test_gdpo_of_functions_that_do_not_apply_to_all():
    """Check `gdpo` with reward functions that apply to only one of two tasks.

    A sample whose reward function failed must have the advantage 0.
    """
    nan = math.nan
    scores = {
        "math": torch.tensor([1.0, 0.0, 1.0, nan, nan, nan]),
        "code": torch.tensor([nan, nan, nan, 0.0, 1.0, nan]),
        "form": torch.tensor([0.0, 0.0, 0.0, 1.0, 1.0, 1.0]),
    }
    total = torch.tensor([1.0, 0.0, 1.0, 1.0, 2.0, nan])  # `code` failed for the last sample
    found = Advantages("gdpo", {}, 3, dict.fromkeys(scores, 1.0)).of(total, scores, [1] * 6)
    assert found[1] < 0 < found[0] and found[3] < 0 < found[4] and found[5] == 0
