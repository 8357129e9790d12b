"""Extraction rules, the rule rewards, and a reward set that nothing can stop."""

import asyncio
import math
import time
from decimal import Decimal

import pytest
import torch

from grpo_fast.rewards import (
    REWARDS,
    RewardError,
    RewardSet,
    WeightedReward,
    build_rewards,
    scorer_for,
)
from grpo_fast.rewards.calling import parameters_of
from grpo_fast.rewards.extract import extract_lenient, extract_strict, parse_number
from grpo_fast.rewards.rules import sort_inclusion_ordering, sort_positions
from tests.reward_specs import own, spec


def score(name, completion, answer, prompt=""):
    given = {"prompts": [prompt], "completions": [completion], "answers": [answer]}
    return REWARDS[name](**parameters_of(REWARDS[name]).select(given))[0]


# --------------------------------------------------------------------------------------- Extraction
@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("18", "18"), (" 18 ", "18"), ("$18", "18"), ("18.", "18"), ("18.0", "18"),
        ("18.50", "18.5"), ("18%", "18"), ("**18**", "18"), ("**18.**", "18"), ("**18**.", "18"),
        ("1,080", "1080"), ("18,", "18"), ("-7", "-7"), ("-$7", "-7"), ("$-7", "-7"),
        ("$1,234,567.89", "1234567.89"), ("0" * 31 + "1", "1"), ("-0", "0"), ("0.1", "0.1"),
        ("9" * 32, "9" * 32),
    ],
)  # fmt: skip
def test_numbers(text, value):
    assert parse_number(text) == Decimal(value)


@pytest.mark.parametrize(
    "text",
    [
        "", "eighteen", "18 eggs", "1 8", "5*3", "1e5", "1/2", ".5", "--1", "+1", "0x10", "1.2.3",
        "NaN", "inf", "-", "$", "9" * 33, "1." + "0" * 32, "\u0661\u0668", "\uff11\uff18", "\u00b2",
        "\u22127", "1_000",
    ],
)  # fmt: skip
def test_not_numbers(text):
    assert parse_number(text) is None


@pytest.mark.parametrize(
    ("text", "strict", "lenient"),
    [
        ("6 * 3 = 18\n#### 18", 18, 18),
        ("####18", 18, 18),
        ("#### 1\n#### 2", 2, 2),  # the last one wins
        ("#### 18\nSo 5 are left.", 18, 18),  # what follows the line does not matter
        ("<answer>18</answer>", 18, 18),
        ("<answer>\n $18.00 \n</answer>", 18, 18),
        ("<answer>1</answer> or <answer>2</answer>", 2, 2),
        ("<answer>1</answer>\n#### 2", 2, 2),  # the later of the two
        ("#### 1\n<answer>2</answer>", 2, 2),
        ("<answer>#### 3</answer>", 3, 3),
        ("#### 18 eggs for 3 days", None, 18),
        ("#### 7\n#### ", None, 7),
        ("<answer>18", None, 18),
        ("The answer is $1,080.", None, 1080),
        ("from 10-18", None, 18),
        ("a loss of -$5", None, -5),
        ("a loss of \u2212$5, from 10\u22128 to \u22127", None, -7),
        ("#### \u22127", None, -7),
        ("5*3=15", None, 15),
        ("#### .7", None, Decimal("0.7")),
        ("a share of -$.75", None, Decimal("-0.75")),
        ("so it is ...7", None, 7),
        ("section 1.2.3", None, 3),
        ("**18**", None, 18),
        ("no number", None, None),
        ("9" * 40, None, None),
    ],
)
def test_strict_and_lenient(text, strict, lenient):
    assert (extract_strict(text), extract_lenient(text)) == (strict, lenient)


@pytest.mark.parametrize(
    "unit",
    [
        "1", "-", "1,", "####", "#### ", "<answer>", "</answer>", "<answer>1</answer>", "1.", "1.1",
        " ", "$", "*", "%", "\n", "-1", "-$", ",", "#", "<", "####\n", "<<", "1 ", "\u0661",
    ],
)  # fmt: skip
def test_extraction_is_linear_on_64k_adversarial_characters(unit):
    text = (unit * (1 << 16))[: 1 << 16]
    for candidate in (text, text + "x", "#### " + text, f"<answer>{text}</answer>"):
        start = time.process_time()  # others' work on this machine does not count
        extract_strict(candidate)
        extract_lenient(candidate)
        assert time.process_time() - start < 0.1


# ------------------------------------------------------------------------------------- Rule rewards
def test_gsm8k_rewards():
    for text in ("#### 18", "#### 18.0", "#### $18", "#### 18.", "<answer>18</answer>"):
        assert score("gsm8k_correct", text, "18") == score("gsm8k_format", text, "18") == 1.0
    assert score("gsm8k_correct", "#### 1080", "1,080") == 1.0
    assert score("gsm8k_correct", "#### 19", "18") == 0 < score("gsm8k_format", "#### 19", "18")
    assert score("gsm8k_correct", "it is 18", "18") == 0.0
    assert score("gsm8k_correct_lenient", "it is 18", "18") == 1.0
    assert score("gsm8k_format", "", "18") == score("gsm8k_correct_lenient", "", "18") == 0.0
    with pytest.raises(ValueError, match="answers: expected a number"):
        score("gsm8k_correct", "#### 1", "one")


@pytest.mark.parametrize(
    ("given", "positions", "inclusion_ordering"),
    [
        ("1 2 3", 1.0, 2.0),
        ("3 2 1", 1 / 3, 1.0),
        ("2 1 3", 1 / 3, 1.5),
        ("1 2", 2 / 3, 2 / 3 + 1 / 2),
        ("", 0.0, 0.0),
        ("1 2 3 3", 3 / 4, 2.0),  # longer than asked for
        ("1 2 = 3", 2 / 4, 1 + 1 / 3),
        ("9 9 9", 0.0, 1.0),
    ],
)
def test_sort_rewards(given, positions, inclusion_ordering):
    assert score("sort_positions", given, "1 2 3") == pytest.approx(positions)
    assert score("sort_inclusion_ordering", given, "1 2 3") == pytest.approx(inclusion_ordering)
    assert score("exact_match", given, "1 2 3") == float(given == "1 2 3")
    assert score("sort_inclusion_ordering", "2 10", "2 10") == 2.0  # as numbers, not as text


# ------------------------------------------------------------------------------------------ The set
def test_weighted_sum():
    rewards = build_rewards([spec("gsm8k_correct", 2.0), spec("gsm8k_format", 0.5)])
    result = rewards(["q"] * 3, ["#### 18", "#### 1", "18"], ["18"] * 3)
    assert result.total.tolist() == [2.5, 0.5, 0.0] and result.total.dtype == torch.float32
    assert result.per_fn["gsm8k_correct"].tolist() == [1, 0, 0]
    assert result.per_fn["gsm8k_format"].tolist() == [1, 1, 0]
    assert result.failures == {"gsm8k_correct": 0, "gsm8k_format": 0}
    assert rewards([], [], []).total.shape == (0,)

    def broken(*, prompts, completions, answers):
        raise KeyError("x")

    exact = WeightedReward("exact_match", 1.0, REWARDS["exact_match"])
    rewards = RewardSet([exact, WeightedReward("watched", 0.0, broken)], max_failures=1.0)
    result = rewards(["p"], ["a"], ["a"])
    assert result.total.tolist() == [1.0] and result.per_fn["watched"].isnan().all()


def test_raising_costs_only_the_samples_that_raise(caplog):
    def touchy(*, prompts, completions, answers):
        if "bad" in completions:
            raise RuntimeError("boom \x1b[31m")
        return [1.0] * len(completions)

    rewards = own(touchy)
    result = rewards(["p"] * 4, ["a", "bad", "b", "c"], ["x"] * 4)
    assert result.total.isnan().tolist() == [False, True, False, False]
    assert result.failures == {"f": 1} and rewards.state.failed_total == {"f": 1}
    assert "boom" in caplog.text and "\x1b" not in caplog.text


def test_a_coroutine_is_awaited_inside_a_loop_too():
    async def slow(*, prompts, completions, answers):
        await asyncio.sleep(0)
        return [True, 0.5]

    async def inside_a_loop():
        return own(slow)(["p"] * 2, ["a"] * 2, ["x"] * 2).total.tolist()

    assert asyncio.run(inside_a_loop()) == [1.0, 0.5]


def test_run_ends_above_the_threshold_only():
    failing = iter([1, 1, 1, 1, 4, 4, 4, 4])

    def sometimes(*, prompts, completions, answers):
        bad = next(failing)
        return [math.nan] * bad + [1.0] * (4 - bad)

    rewards = own(sometimes, max_failures=0.5)
    with pytest.raises(RewardError, match=r"f: 16 of the last 28 samples .*not a finite number"):
        while True:
            rewards(["p"] * 4, ["a"] * 4, ["x"] * 4)
    # It ended on the 7th call, not before the share passed one half.
    assert next(failing, None) == 4


def test_set_refuses_bad_arguments():
    with pytest.raises(ValueError, match="'gsm8k_corect'; did you mean 'gsm8k_correct'"):
        build_rewards([spec("gsm8k_corect")])
    with pytest.raises(ValueError, match="expected different names"):
        build_rewards([spec("exact_match"), spec("exact_match")])
    with pytest.raises(ValueError, match="finite weight for exact_match, got nan"):
        build_rewards([spec("exact_match", math.nan)])
    with pytest.raises(ValueError, match="lists of one length, got 1, 2, 1"):
        build_rewards([spec("exact_match")])(["p"], ["a", "b"], ["x"])
    with pytest.raises(ValueError, match="level, prompts.*one length, got 2, 1, 1, 1"):
        build_rewards([spec("exact_match")])(["p"], ["a"], ["x"], {"level": [1, 2]})
    with pytest.raises(ValueError, match="max_failures"):
        own(REWARDS["exact_match"], max_failures=2)


def test_scorers():
    number, symbols, text = scorer_for("gsm8k"), scorer_for("sort"), scorer_for("jsonl")
    assert number.strict("#### 18.0") == number.lenient("so 18") == number.gold("18")
    assert number.strict("so 18") is None
    assert symbols.strict("1  2") == symbols.gold("1 2") and symbols.strict("") is None
    assert text.strict("a  b") == text.lenient("x\na b\n") == text.gold("a b")
    assert scorer_for("jsonl", ["1", "2,000"]).gold("2,000") == Decimal(2000)
    with pytest.raises(ValueError, match="task: expected one of"):
        scorer_for("chess")


def test_the_points_of_the_lecture():
    """Included numbers + neighbours in order, of `1 0 2` and `3 2 4`; and their scaled twins."""
    given = {"answers": ["0 1 2"] * 3 + ["2 3 4"],
             "completions": ["0 1 2", "1 0 2", "0 0 1", "4 4 4"]}  # fmt: skip
    assert sort_inclusion_ordering(**given, scaled=False) == [5.0, 4.0, 4.0, 3.0]
    assert sort_inclusion_ordering(**given) == pytest.approx([2.0, 1.5, 5 / 3, 4 / 3])
    assert sort_positions(**given, scaled=False) == [3.0, 1.0, 1.0, 1.0]
    assert sort_positions(**given) == pytest.approx([1.0, 1 / 3, 1 / 3, 1 / 3])
