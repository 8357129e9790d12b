"""What rewards become in a run: the running baseline, GDPO, rewards per token."""

import json
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from grpo_fast import group_advantages
from grpo_fast.objective.baseline import RunningBaseline, running_baseline
from grpo_fast.rewards import RewardResult
from grpo_fast.rollout import Rollout
from grpo_fast.train.collect.advantages import Advantages
from grpo_fast.train.collect.groups import Drawn
from grpo_fast.train.update.precompute import token_rewards
from tests.train.resuming import run
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
    assert running_baseline("baseline", {"running": False, "value": 1.0}) is None
    assert running_baseline("baseline", {"value": 1.0}) is None
    assert running_baseline("baseline", {}).value == 0.0  # no constant: a running one
    assert running_baseline("centered", {}) is None
    one = RunningBaseline(value=3.0)
    for state in (one.state_dict(), None):
        other = RunningBaseline(value=3.0)
        other.load_state_dict(state or json.loads(json.dumps(one.state_dict())))
        assert other.value == one.value
        for baseline in (one, other):
            baseline.update(torch.tensor([0.1, 0.7]))
        assert other.value == one.value and one.value != 3.0


def test_a_step_is_measured_by_those_before_it(tmp_path, spied):
    """Advantage = reward − baseline, sample by sample; the first step's is `value`."""
    calls = spied(Advantages, "of")
    options = ["advantage_options.value=0.5", "advantage_options.decay=0.75", "steps=4"]
    sort(tmp_path / "a", *RUNNING, *options)
    expected, mean = 0.5, None
    for call in calls:
        rewards = call.args[1].total.double()
        torch.testing.assert_close(call.result.double(), rewards - expected, rtol=0, atol=1e-6)
        now = rewards.mean().item()
        expected = mean = now if mean is None else 0.75 * mean + 0.25 * now
    assert len(calls) == 4


def test_gdpo_takes_each_reward_apart(tmp_path, spied):
    """Of the run's own rewards, by their weights."""
    calls = spied(Advantages, "of")
    options = ["advantages=gdpo", "steps=2", "advantage_options.clip_high=1.5"]
    sort(tmp_path / "a", *options, "rewards.0.weight=2", "rewards.1.weight=0.5")
    assert len(calls) == 2
    for call in calls:
        listed, bounds = torch.stack(list(call.args[1].per_fn.values())), {"clip_high": 1.5}
        expected = group_advantages(listed, "gdpo", group_size=4, weights=[2.0, 0.5], **bounds)
        assert torch.equal(call.result, expected) and expected.any()


# ----------------------------------------------------------------- Rewards per token
PPO = ["advantages=gae", "critic={bootstrap: false}", "inner_iterations=2", "checkpoint.every=1",
       "log.completions_every=0", "eval.every=0"]  # fmt: skip
FILE = """
def value(ids):
    return float(sum(ids) % 5)

def whole(completion_ids):
    return [value(ids) for ids in completion_ids]

def last(completion_ids):
    return [[0.0] * (len(ids) - 1) + [value(ids)] for ids in completion_ids]

def first(completion_ids):
    return [[value(ids)] + [0.0] * (len(ids) - 1) for ids in completion_ids]
"""


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    file = tmp_path_factory.mktemp("rewards") / "own.py"
    file.write_text(FILE)
    return lambda name: [*PPO, f"rewards=[{{name: '{file}:{name}', label: own, in_process: true}}]"]


def metrics(found):
    return [{k: v for k, v in row.items() if "own" not in k} for row in found["metrics"]]


def test_a_reward_at_the_last_token_is_one_of_the_whole_and_elsewhere_it_is_not(tmp_path, words):
    whole, last, first = (run(tmp_path / name, *words(name)) for name in ("whole", "last", "first"))
    assert metrics(last) == metrics(whole)
    assert metrics(first)[1]["reward"] == metrics(whole)[1]["reward"]  # of the same completions
    assert metrics(first)[1]["grad_norm"] != metrics(whole)[1]["grad_norm"]


def drawn(total, per_token, lengths):
    ids = [[7] * n for n in lengths]
    logps = [torch.zeros(n) for n in lengths]
    rollout = Rollout(["p"] * 2, [[1]] * 2, ids, logps, ["t"] * 2, [False] * 2)
    total = torch.tensor(total)
    return Drawn([None], rollout, RewardResult(total, {"f": total}, {"f": Counter()}, per_token))


def test_groups_with_and_without_rewards_per_token_are_put_together_and_chosen():
    plain = drawn([1.0, 2.0], None, [3, 0])
    listed = drawn([3.0, 4.0], [torch.tensor([1.0, 2.0]), torch.tensor([4.0])], [2, 1])
    both = plain.concat(listed)
    rows = [row.tolist() for row in both.scores.per_token]
    assert rows == [[0.0, 0.0, 1.0], [], [1.0, 2.0], [4.0]]
    chosen = both.select([1]).scores.per_token
    assert [row.tolist() for row in chosen] == [[1.0, 2.0], [4.0]]
    for without in (plain.concat(plain), plain.select([0])):
        assert without.scores.per_token is None
    values = [torch.zeros(2), torch.zeros(1), torch.zeros(2)]
    batch = SimpleNamespace(
        of_each=lambda name: values, advantages=torch.tensor([3.0, torch.nan, 5.0]),
        token_rewards=[torch.tensor([1.0, 2.0]), torch.tensor([torch.nan]), torch.tensor([5.0, 0])],
    )  # fmt: skip
    found = token_rewards(batch, None, "k3")
    assert found[0].tolist() == [1.0, 2.0] and found[1].isnan().all()
    assert found[2].tolist() == [5.0, 0.0]
    batch.token_rewards = None
    assert token_rewards(batch, None, "k3")[2].tolist() == [0.0, 5.0]
