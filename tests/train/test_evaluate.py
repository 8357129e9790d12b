"""Evaluation: accuracies, standard errors, pass@k and maj@k against counting by hand."""

from __future__ import annotations

import itertools
import math
import statistics

import pytest

from grpo_fast.data import Example
from grpo_fast.rewards import REWARDS, RewardSet, WeightedReward, scorer_for
from grpo_fast.rollout import Rollout
from grpo_fast.train.evaluation.evaluate import evaluate, majority, mean_and_error, pass_at_k

NUMBERS = scorer_for("gsm8k")


def asked(replies):
    """A `generate` that says replies[prompt][sample], and the calls made to it."""
    calls = []

    def generate(prompts, *, samples, temperature, seed):
        calls.append((list(prompts), samples, temperature, seed))
        return Rollout(texts=[replies[p][s] for p in prompts for s in range(samples)])

    return generate, calls


def examples(*answers):
    return [Example(f"q{i}", answer, None) for i, answer in enumerate(answers)]


def test_greedy_strict_and_lenient():
    generate, calls = asked({"q0": ["#### 1"], "q1": ["it is 2"], "q2": ["#### 9"], "q3": ["?"]})
    rewards = RewardSet([WeightedReward("gsm8k_format", 2.0, REWARDS["gsm8k_format"])])
    asked_of = examples("1", "2", "3", "4")
    metrics = evaluate(generate, asked_of, rewards, NUMBERS, batch_size=3).metrics
    assert metrics["eval_accuracy_strict"] == 0.25 and metrics["eval_accuracy_lenient"] == 0.5
    assert metrics["eval_accuracy_strict_se"] == pytest.approx(statistics.stdev([1, 0, 0, 0]) / 2)
    assert metrics["eval_reward"] == 1.0
    assert metrics["eval_reward_se"] == pytest.approx(statistics.stdev([2, 0, 2, 0]) / 2)
    assert metrics["eval_rewards/gsm8k_format"] == 0.5
    assert metrics["eval_n"] == 4 and metrics["eval_samples"] == 1
    assert [c[0] for c in calls] == [["q0", "q1", "q2"], ["q3"]] and {c[2] for c in calls} == {0.0}


def test_sampled_standard_error_is_over_questions():
    generate, calls = asked(
        {"q0": ["#### 1"] * 4, "q1": ["#### 2", "#### 2", "#### 5", "no"], "q2": ["x"] * 4}
    )
    options = {"samples": 4, "temperature": 0.7, "k": (1, 2, 4), "batch_size": 8, "seed": 3}
    result = evaluate(generate, examples("1", "2", "3"), None, NUMBERS, **options)
    metrics = result.metrics
    rates = [1.0, 0.5, 0.0]
    assert metrics["eval_accuracy_strict"] == 0.5
    error = statistics.stdev(rates) / math.sqrt(3)
    assert metrics["eval_accuracy_strict_se"] == pytest.approx(error)
    assert metrics["eval_pass@1"] == pytest.approx(0.5)
    assert metrics["eval_pass@2"] == pytest.approx((1 + 5 / 6 + 0) / 3)
    assert metrics["eval_pass@4"] == pytest.approx(2 / 3)
    assert metrics["eval_maj@4"] == pytest.approx(2 / 3)
    assert metrics["eval_maj@2"] == pytest.approx((1 + 0.5 + 0) / 3)  # blocks (2, 2) and (5, none)
    assert metrics["eval_maj@1"] == metrics["eval_accuracy_strict"]
    assert "eval_reward" not in metrics and "eval_maj@4_lenient" in metrics
    assert [(len(c[0]), *c[1:]) for c in calls] == [(2, 4, 0.7, 3), (1, 4, 0.7, 5)]
    assert result.per_question["accuracy_strict"] == rates


@pytest.mark.parametrize(("n", "correct"), [(1, 0), (1, 1), (5, 0), (5, 2), (6, 5), (6, 6), (8, 3)])
def test_pass_at_k_is_the_share_of_subsets_with_a_correct_one(n, correct):
    samples = [True] * correct + [False] * (n - correct)
    for k in range(1, n + 1):
        subsets = list(itertools.combinations(samples, k))
        share = sum(map(any, subsets)) / len(subsets)
        assert pass_at_k(n, correct, k) == pytest.approx(share, abs=1e-12)


def test_pass_at_k_is_stable_and_refuses_nonsense():
    assert pass_at_k(100_000, 1, 10) == pytest.approx(1e-4)
    for wrong in ((4, 5, 1), (4, 1, 5), (4, 1, 0), (4, -1, 1)):
        with pytest.raises(ValueError, match="pass_at_k"):
            pass_at_k(*wrong)


def test_majority():
    assert majority([1, 2, 2]) == 2
    assert majority([3, 1, 1, 3]) == 3  # a tie goes to the first seen
    assert majority([None, None, 4]) == 4  # what was not found has no vote
    assert majority([None]) is None and majority([]) is None


def test_maj_counts_equal_numbers_together():
    generate, _ = asked({"q0": ["#### 5", "#### 1,080", "#### 1080.0"]})
    options = {"samples": 3, "temperature": 1.0, "k": (3,)}
    metrics = evaluate(generate, examples("1080"), None, NUMBERS, **options).metrics
    assert metrics["eval_maj@3"] == 1.0 and math.isnan(metrics["eval_maj@3_se"])


def test_a_vote_is_of_whole_blocks_of_k():
    """Samples behind the last whole block have none: theirs would be a vote of fewer."""
    said = {"q0": [1, 1, 1, 9, 9], "q1": [9, 1, 1, 9, 1]}
    generate, _ = asked({q: [f"#### {x}" for x in answers] for q, answers in said.items()})
    options = {"samples": 5, "temperature": 1.0, "k": (2, 3, 4, 5)}
    found = evaluate(generate, examples("1", "1"), None, NUMBERS, **options).per_question
    assert found["maj@2"] == [1.0, 0.5]  # (1 1) (1 9), a tie for the first; (9 1) (1 9)
    assert found["maj@3"] == found["maj@5"] == [1.0, 1.0]
    assert found["maj@4"] == [1.0, 0.0]  # (9 1 1 9): a tie


def test_lost_rewards_do_not_count_in_the_mean():
    def touchy(*, prompts, completions, answers):
        return [math.nan if c == "bad" else 1.0 for c in completions]

    generate, _ = asked({"q0": ["bad", "bad"], "q1": ["bad", "ok"], "q2": ["ok", "ok"]})
    rewards = RewardSet([WeightedReward("f", 1.0, touchy)], max_failures=1.0)
    options = {"samples": 2, "temperature": 1.0}
    metrics = evaluate(generate, examples("1", "2", "3"), rewards, NUMBERS, **options).metrics
    assert metrics["eval_reward"] == 1.0 and metrics["eval_reward_se"] == 0.0


def test_mean_and_error():
    assert mean_and_error([2.0, 4.0]) == (3.0, 1.0)
    assert mean_and_error([2.0])[0] == 2.0 and math.isnan(mean_and_error([2.0])[1])
    assert all(map(math.isnan, mean_and_error([])))


def test_refuses_no_examples():
    with pytest.raises(ValueError, match="examples: expected at least one"):
        evaluate(asked({})[0], [], None, NUMBERS)
