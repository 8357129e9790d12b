"""Tests of the evaluation against values computed by hand."""

import itertools
import math
import statistics
from types import SimpleNamespace

import pytest

from grpo_fast import rollout
from grpo_fast.data import Example
from grpo_fast.rewards import REWARDS, RewardSet, WeightedReward
from grpo_fast.train.config import EvalConfig
from grpo_fast.train.evaluation.evaluate import evaluate, majority, mean_and_error, pass_at_k

FORMAT = RewardSet([WeightedReward("gsm8k_format", 2.0, REWARDS["gsm8k_format"])])


@pytest.fixture
def evaluated(monkeypatch):
    """Return a function that evaluates a policy with given replies.

    The completion of a prompt's i-th sample is `replies[prompt][i]`. The attribute `calls` of the
    function lists the prompts and the seed of each call of `rollout.generate`.
    """

    def run(replies, questions, options, rewards=FORMAT, seed=0):
        def generate(policy, prompts, sampling, *, group_size, seed, engine):
            assert sampling.batch_size is None and sampling.temperature == options.temperature
            run.calls.append((list(prompts), seed))
            texts = [replies[p][s] for p in prompts for s in range(group_size)]
            return SimpleNamespace(texts=texts, completion_ids=[[1]] * len(texts))

        run.calls = []
        monkeypatch.setattr(rollout, "generate", generate)
        monkeypatch.setattr(rollout, "prompt_texts", lambda policy, prompts: prompts)
        return evaluate(None, questions, rewards, "gsm8k", options, seed)

    return run


def examples(*answers):
    return [Example(f"q{i}", answer, None) for i, answer in enumerate(answers)]


def test_greedy_strict_and_lenient(evaluated):
    replies = {"q0": ["#### 1"], "q1": ["it is 2"], "q2": ["#### 9"], "q3": ["?"]}
    questions = examples("1", "2", "3", "4")
    metrics = evaluated(replies, questions, EvalConfig(batch_size=3)).metrics
    assert metrics["eval_accuracy_strict"] == 0.25 and metrics["eval_accuracy_lenient"] == 0.5
    assert metrics["eval_accuracy_strict_se"] == pytest.approx(statistics.stdev([1, 0, 0, 0]) / 2)
    assert metrics["eval_reward"] == 1.0
    assert metrics["eval_reward_se"] == pytest.approx(statistics.stdev([2, 0, 2, 0]) / 2)
    assert metrics["eval_rewards/gsm8k_format"] == 0.5
    assert metrics["eval_n"] == 4 and metrics["eval_samples"] == 1
    assert [prompts for prompts, _ in evaluated.calls] == [["q0", "q1", "q2"], ["q3"]]


def test_sampled_standard_error_is_over_questions(evaluated):
    replies = {"q0": ["#### 1"] * 4, "q1": ["#### 2", "it is 2", "#### 2", "no"], "q2": ["x"] * 4}
    options = EvalConfig(samples=4, temperature=0.7, k=[1, 2, 4], batch_size=8)
    result = evaluated(replies, examples("1", "2", "3"), options, seed=3)
    metrics = result.metrics
    rates = [1.0, 0.5, 0.0]
    assert result.per_question["accuracy_strict"] == rates
    assert metrics["eval_accuracy_strict"] == metrics["eval_pass@1"] == 0.5
    error = statistics.stdev(rates) / math.sqrt(3)
    assert metrics["eval_accuracy_strict_se"] == pytest.approx(error)
    assert metrics["eval_pass@2"] == pytest.approx((1 + 5 / 6 + 0) / 3)
    assert metrics["eval_pass@4"] == pytest.approx(2 / 3)
    assert metrics["eval_pass@1_lenient"] == pytest.approx((1 + 3 / 4 + 0) / 3)
    seeds = [("evaluate", 3), ("evaluate", 5)]
    assert evaluated.calls == list(zip([["q0", "q1"], ["q2"]], seeds, strict=True))


@pytest.mark.parametrize(("n", "correct"), [(1, 0), (1, 1), (5, 0), (5, 2), (6, 5), (6, 6), (8, 3)])
def test_pass_at_k_is_the_share_of_subsets_with_a_correct_one(n, correct):
    samples = [True] * correct + [False] * (n - correct)
    for k in range(1, n + 1):
        subsets = list(itertools.combinations(samples, k))
        share = sum(map(any, subsets)) / len(subsets)
        assert pass_at_k(n, correct, k) == pytest.approx(share, abs=1e-12)
    assert pass_at_k(100_000, 1, 10) == pytest.approx(1e-4)  # binomials would overflow a float


def test_majority():
    assert majority([1, 2, 2]) == 2
    assert majority([3, 1, 1, 3]) == 3  # the first answer wins a tie
    assert majority([None, None, 4]) == 4  # None does not vote
    assert majority([None]) is None


def test_maj_at_k_averages_over_blocks_of_k_samples(evaluated):
    """Check that samples after the last complete block are not used."""
    said = {"q0": [1, "1.0", 1, 9, 9], "q1": [9, 1, "1.0", 9, 1]}  # 1 and 1.0 are one answer
    replies = {question: [f"#### {x}" for x in answers] for question, answers in said.items()}
    options = EvalConfig(samples=5, temperature=1.0, k=[2, 3, 4, 5])
    found = evaluated(replies, examples("1", "1"), options).per_question
    assert found["maj@2"] == [1.0, 0.5]  # blocks (1 1) (1 9) and (9 1) (1 9)
    assert found["maj@3"] == found["maj@5_lenient"] == [1.0, 1.0]
    assert found["maj@4"] == [1.0, 0.0]  # the block (9 1 1 9) is a tie, which 9 wins


def test_lost_rewards_do_not_count_in_the_mean_and_its_error(evaluated):
    def touchy(*, prompts, completions, answers):
        return [math.nan if c == "bad" else 1.0 for c in completions]

    replies = {"q0": ["bad", "bad"], "q1": ["bad", "ok"], "q2": ["ok", "ok"]}
    rewards = RewardSet([WeightedReward("f", 1.0, touchy)], max_failures=1.0)
    options = EvalConfig(samples=2, temperature=1.0)
    metrics = evaluated(replies, examples("1", "2", "3"), options, rewards).metrics
    assert metrics["eval_reward"] == 1.0 and metrics["eval_reward_se"] == 0.0
    assert mean_and_error([2.0, 4.0]) == (3.0, 1.0)
    assert mean_and_error([2.0])[0] == 2.0 and math.isnan(mean_and_error([2.0])[1])
    assert all(map(math.isnan, mean_and_error([])))
    with pytest.raises(ValueError, match="examples: expected at least one"):
        evaluated({}, [], EvalConfig())
