"""Tests of a step's normalizers and advantages against direct computation."""

import math

import pytest
import torch

from grpo_fast import LossConfig
from grpo_fast.objective.advantages import RunningBaseline, split_options
from grpo_fast.rollout import Samples
from grpo_fast.train.batch import Totals
from grpo_fast.train.collect import Advantages
from grpo_fast.train.critic import token_rewards
from tests.pairs import pairs
from tests.tiny import tiny_policy
from tests.train.test_ppo_step import CUT, SCORES, make_batch
from tests.train.tiny_runs import sort
from tests.train.tiny_steps import gradients, table_of

pytestmark = pytest.mark.usefixtures("no_pictures")


NO_VERDICT = 2


# With 4 ranks, one is idle.
@pairs(mask_truncated=[False, True], updates=[1, 3], ranks=[1, 2, 4], is_shuffled=[False, True])
def test_totals_count_what_the_masks_do(mask_truncated, updates, ranks, is_shuffled):
    scores = SCORES.clone()
    scores[NO_VERDICT] = math.nan
    options = dict(mask_truncated=mask_truncated, updates=updates, budget=14, ranks=ranks)
    steps = [make_batch(scores, rank=rank, **options) for rank in range(ranks)]
    if is_shuffled:
        for step in steps:
            step.shuffle("7")  # distributes the groups over the minibatches
    left_out, idle = {NO_VERDICT, *(CUT if mask_truncated else [])}, 0
    counted = [0 if i in left_out else n for i, n in enumerate(steps[0].samples.lengths)]
    for k in range(updates):
        everywhere = [micro for step in steps for micro in step.minibatches[k]]
        real = [micro for micro in everywhere if not micro.is_idle]
        chosen = sorted(i for micro in real for i in micro.chosen)
        assert chosen == list(steps[0].parts[k])
        items = sum(counted[i] for i in chosen)
        trunk = sum(micro.trunk_tokens for micro in real)
        expected = Totals(max(1, items), len(chosen), trunk)
        assert [step.totals[k] for step in steps] == [expected] * ranks
        assert items == sum(micro.active_tokens for micro in everywhere)
        idle += len(everywhere) - len(real)
    assert idle > 0 or ranks < 4


def test_a_step_without_a_token_that_counts_moves_nothing():
    policy, batch = tiny_policy(), make_batch(torch.full((9,), math.nan))
    assert batch.totals[0].items == 1
    seen, found = gradients(policy, batch.minibatches[0], LossConfig(), totals=batch.totals[0])
    assert seen["loss"] == 0 and not any(gradient.any() for gradient in found.values())


# --------------------------------------------------------------------------------------- Advantages
RUNNING = ["advantages=baseline", "advantage_options.running=true"]


def test_the_mean_of_the_steps_before():
    baseline = RunningBaseline(value=0.25, decay=0.5)
    assert baseline.value == 0.25
    steps = ([1.0, 0.0], [float("nan"), 0.75], [float("nan")] * 2, [2.0, 2.0])
    seen = []
    for rewards in steps:
        baseline.update(torch.tensor(rewards))
        seen.append(baseline.value)
    assert seen == [0.5, 0.625, 0.625, 1.3125]
    for mode, options in (
        ("baseline", {"running": False, "value": 1.0}), ("baseline", {"value": 1.0}),
        ("centered", {}),
    ):  # fmt: skip
        assert split_options(mode, options)[1] is None
    # Without a constant the baseline is a running mean.
    assert split_options("baseline", {})[1].value == 0.0


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


def test_the_reward_belongs_to_the_last_token():
    """Check `token_rewards`. An empty completion has no token for its reward."""
    samples = table_of([[1]], [[7] * n for n in (3, 0, 2)])
    samples.rewards = torch.tensor([1.0, 2.0, math.nan])
    rows = [row.tolist() for row in token_rewards(samples).split(samples.lengths)]
    assert rows[:2] == [[0.0, 0.0, 1.0], []]
    assert rows[2][0] == 0 and math.isnan(rows[2][1])
    assert token_rewards(Samples.cat([samples, samples])[[3]]).tolist() == [0.0, 0.0, 1.0]
