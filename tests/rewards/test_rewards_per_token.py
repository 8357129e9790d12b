"""A reward function may return a list per completion, a number for each of its tokens."""

from __future__ import annotations

import pytest
import torch

from grpo_fast.data import Example
from grpo_fast.rewards import RewardSet, WeightedReward, build_rewards, score
from tests.reward_specs import spec

IDS = [[5, 6, 7], [8], []]


def steps(*, completion_ids):
    return [[float(i % 2) for i in ids] for ids in completion_ids]


def flat(*, completions):
    return [10.0, 20.0, 30.0]


def scored(*functions, ids=IDS, texts=("a", "b", "c")):
    rewards = RewardSet([WeightedReward(f.__name__, w, f) for f, w in functions])
    examples = [Example("p", None, None)] * len(texts)
    return score(rewards, examples, list(texts), ids)


def test_the_total_is_the_sum_and_a_plain_reward_stands_at_the_last_token():
    found = scored((steps, 2.0), (flat, 0.5))
    assert found.per_fn["steps"].tolist() == [2.0, 0.0, 0.0]
    assert found.total.tolist() == [9.0, 10.0, 15.0]
    assert [row.tolist() for row in found.per_token] == [[2.0, 0.0, 7.0], [10.0], []]


def test_functions_without_lists_have_none_per_token_and_watched_ones_do_not_count():
    assert scored((flat, 1.0)).per_token is None
    found = scored((steps, 0.0), (flat, 1.0))
    assert found.per_token is None and found.per_fn["steps"].tolist() == [2.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        ([[1.0, 2.0], [1.0], []], "wrong_length"),
        ([[1.0, 2.0, float("nan")], [1.0], []], "not_a_number"),
        ([[1.0, "2", 3.0], [1.0], []], "not_a_number"),
        ([[1.0, [2.0], 3.0], [1.0], []], "not_a_number"),
        ([[3e38, 3e38, 0.0], [1.0], []], "not_a_number"),
        ([[1.0, None, 3.0], [1.0], []], "not_a_number"),
    ],
)
def test_a_row_that_does_not_fit_costs_its_sample(rows, reason):
    def odd(*, completions):
        return rows

    found = scored((odd, 1.0), (flat, 1.0))
    assert found.reasons["odd"] == {reason: 1}
    assert found.total.isnan().tolist() == [True, False, False]
    assert found.per_token[0].isnan().any() and found.per_token[1].tolist() == [21.0]


def test_tensors_and_arrays_and_a_worker(tmp_path):
    def tensors(*, completion_ids):
        return [torch.tensor(ids, dtype=torch.float64) for ids in completion_ids]

    def table(*, completion_ids):  # rows of one length
        return torch.ones(3, 2)

    assert [r.tolist() for r in scored((tensors, 1.0)).per_token] == [[5.0, 6.0, 7.0], [8.0], []]
    assert scored((table, 1.0), ids=[[1, 2]] * 3).total.tolist() == [2.0, 2.0, 2.0]
    file = tmp_path / "own.py"
    file.write_text(
        "def steps(completion_ids):\n    return [[0.5 for _ in i] for i in completion_ids]"
    )
    rewards = build_rewards([spec(f"{file}:steps")])
    found = score(rewards, [Example("p", None, None)] * 3, ["a", "b", "c"], IDS)
    assert found.total.tolist() == [1.5, 0.5, 0.0]
    assert [len(row) for row in found.per_token] == [3, 1, 0]


def test_without_token_ids_a_list_is_no_number():
    def two(*, completions):
        return [[1.0, 2.0]] * 3

    found = scored((two, 1.0), ids=None)
    assert found.total.isnan().all() and found.reasons == {"two": {"not_a_number": 3}}
