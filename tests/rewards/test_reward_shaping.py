"""Tests of length and format rewards against explicit formulas, and of rewards per token."""

import pytest
import torch

from grpo_fast.data import Example
from grpo_fast.rewards import RewardSet, WeightedReward, build_rewards, score
from tests.reward_specs import spec


def found(name, *, texts=None, lengths=None, **options):
    count = len(texts or lengths)
    columns = {} if lengths is None else {"completion_lengths": lengths}
    rewards = build_rewards([spec(name, **options)])
    result = rewards(["p"] * count, texts or ["a"] * count, [None] * count, columns)
    return result.total.tolist()


def test_overlong_is_the_papers_and_lengths_and_tags_have_a_price():
    lengths = [0, 79, 80, 81, 90, 99, 100, 101, 1000]
    expected = [0, 0, 0, -1 / 20, -10 / 20, -19 / 20, -1, -1, -1]  # equation 13 of the DAPO paper
    assert found("overlong", lengths=lengths, max_length=100, buffer=20) == pytest.approx(expected)
    whole = found("overlong", lengths=[0, 50, 100], max_length=100, buffer=100)
    assert whole == pytest.approx([0, -0.5, -1])
    assert found("length_penalty", lengths=[0, 1, 200], scale=100) == pytest.approx([0, -0.01, -2])
    assert found("format_tags", texts=["[a]", "[b][a]"], tags=["[a]", "[b]"], per_tag=1.0) == [1, 2]


@pytest.mark.parametrize(
    ("text", "tags"),
    [
        ("", 0),
        ("<think>", 1),
        ("<think>a</think>", 2),
        ("<think>a</think><answer>1</answer>", 5),
        ("x <think>a</think> y <answer>1</answer> z", 5),
        ("<answer>1</answer><think>a</think>", 4),  # the tags are in the wrong order
        ("<think>a<think></think><answer>1</answer>", 3),  # <think> occurs twice
        ("<think></answer><answer></think>", 4),
        ("<THINK>", 0),
        ("<think>" * 9000, 0),
    ],
)
def test_a_tenth_per_tag_up_to_a_half(text, tags):
    assert found("format_tags", texts=[text]) == pytest.approx([tags / 10])


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("overlong", {"max_length": 10, "buffer": 11}, "above 0, at most max_length = 10"),
        ("overlong", {"max_length": 10, "buffer": 0}, "buffer: expected a number above 0"),
        ("length_penalty", {"scale": -1}, "scale: expected a number above 0, got -1"),
    ],
)
def test_options_that_make_no_sense(name, options, said, caplog):
    assert str(found(name, lengths=[1], **options)) == "[nan]" and said in caplog.text


# ----------------------------------------------------------- Functions with a reward for each token
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
    assert scored((flat, 1.0)).per_token is None
    found = scored((steps, 0.0), (flat, 1.0))
    assert found.per_token is None and found.per_fn["steps"].tolist() == [2.0, 0.0, 0.0]

    def two(*, completions):
        return [[1.0, 2.0]] * 3

    found = scored((two, 1.0), ids=None)
    assert found.total.isnan().all() and found.reasons == {"two": {"not_a_number": 3}}


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

    def table(*, completion_ids):  # a 2-D tensor instead of a list of rows
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
