"""Rewards per token reach the advantages of PPO: through dynamic sampling, and through a resume."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from grpo_fast.rewards import RewardResult
from grpo_fast.rollout import Rollout
from grpo_fast.train.collect.groups import Drawn
from grpo_fast.train.update.precompute import token_rewards
from tests.train.resuming import run

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

pytestmark = pytest.mark.usefixtures("no_pictures")


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


def test_a_lost_sample_is_lost_and_the_kl_is_added():
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
