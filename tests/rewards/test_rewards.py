"""Tests of answer extraction, rule-based rewards and RewardSet."""

import asyncio
import math
import time
from decimal import Decimal
from fractions import Fraction

import pytest
import torch

from grpo_fast.data import Example
from grpo_fast.data.answers import parse_number
from grpo_fast.errors import Stopped
from grpo_fast.rewards import (
    REWARDS,
    RewardError,
    RewardSet,
    WeightedReward,
    build_rewards,
    scorer_for,
)
from grpo_fast.rewards.conventions import signature_of
from grpo_fast.rewards.scoring import answer_scorer
from tests.reward_specs import ask, own, spec


def score(name, completion, answer, prompt=""):
    given = {"prompts": [prompt], "completions": [completion], "answers": [answer]}
    return REWARDS[name](**signature_of(REWARDS[name]).select(given))[0]


# ------------------------------------------------------------- Extraction of the answer from a text
@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("18", "18"), (" 18 ", "18"), ("$18", "18"), ("18.", "18"), ("18.0", "18"),
        ("18.50", "18.5"), ("18%", "18"), ("**18**", "18"), ("**18.**", "18"), ("**18**.", "18"),
        ("1,080", "1080"), ("18,", "18"), ("-7", "-7"), ("-$7", "-7"), ("$-7", "-7"),
        ("$1,234,567.89", "1234567.89"), ("0" * 31 + "1", "1"), ("-0", "0"), ("0.1", "0.1"),
        ("9" * 32, "9" * 32), ("1e5", "100000"), ("1.5e-3", "0.0015"), (".5", "0.5"), ("+1", "1"),
        ("\u22127", "-7"), ("-.5", "-0.5"), ("\u20ac42", "42"), (": 42", "42"), ("= 42", "42"),
        ("\u00a042", "42"), ("\\boxed{42}", "42"), ("$\\boxed{42}$.", "42"), ("\\$1{,}080", "1080"),
        ("90^\\circ", "90"), ("12\\%", "12"), ("\\(5\\)", "5"), ("- 5", "-5"), ("1/2", "0.5"),
        ("15/2", "7.5"), ("\\boxed{15/2}", "7.5"), ("\\text{42}", "42"), ("1,000/4", "250"),
        ("1\\,080", "1080"), ("\\mathbf{204}", "204"), ("-1/2", "-0.5"),
    ],
)  # fmt: skip
def test_numbers(text, value):
    assert parse_number(text) == Decimal(value)


@pytest.mark.parametrize(
    "text",
    [
        "", "eighteen", "18 eggs", "1 8", "5*3", "--1", "0x10", "1.2.3", "NaN", "inf", "-", "$",
        "9" * 33, "1." + "0" * 32, "\u0661\u0668", "\uff11\uff18", "\u00b2", "1_000", "1,2",
        "1,0800", "1/0", "1/2/3", "1e999", "1e", "e5", "-+1", "1/", "box 5",
        "\\boxed{1} and \\boxed{2}",
        "210^{3}", "1 8/0", "\\frac{1}{2}", "1.5/2", "\\boxed{}", "1/00", "7 1/2", "10^{3}",
    ],
)  # fmt: skip
def test_not_numbers(text):
    assert parse_number(text) is None


@pytest.mark.parametrize(
    ("text", "strict", "lenient"),
    [
        ("6 * 3 = 18\n#### 18", 18, 18), ("####18", 18, 18), ("#### 1\n#### 2", 2, 2),
        ("#### 18\nSo 5 are left.", 18, 18), ("<answer>18</answer>", 18, 18),
        ("<answer>\n $18.00 \n</answer>", 18, 18),
        ("<answer>1</answer> or <answer>2</answer>", 2, 2), ("<answer>1</answer>\n#### 2", 2, 2),
        ("#### 1\n<answer>2</answer>", 2, 2), ("<answer>#### 3</answer>", 3, 3),
        ("#### 18 eggs for 3 days", None, None), ("#### The answer is 18", None, 18),
        ("#### Step 2: add\nso it is 42", None, 42), (r"\boxed{42}. (see step 3)", None, 42),
        (r"\boxed{\text{so } 42}, of 3", None, None), (r"#### \boxed{42}", 42, 42),
        (r"first \boxed{1}, then \boxed{7/2}", None, Decimal("3.5")),
        (r"\boxed{42", None, 42), ("#### 1,2", None, None), ("#### +42", 42, 42),
        ("#### \u20ac42", 42, 42), ("####: 42", 42, 42), ("####\u00a042", 42, 42),
        ("#### 42 %", 42, 42), ("<Answer>42</Answer>", 42, 42), ("<ANSWER> 42 </answer>", 42, 42),
        ("<think>#### 41</think>\n#### 42", 42, 42), ("<think>it is #### 42", None, None),
        ("#### 42\n<think>or 43", 42, 42), ("<think>41</think><think>#### 42", None, None),
        ("<think>#### 42</think>", None, None), ("</think>\n#### 42", 42, 42),
        ("so 1/2 of it", None, Decimal("0.5")), ("so 1e3", None, 1000),
        ("10,20 and 30,400", None, 30400), ("#### 7\n#### ", None, 7), ("<answer>18", None, 18),
        ("The answer is $1,080.", None, 1080), ("from 10-18", None, 18),
        ("a loss of -$5", None, -5), ("a loss of \u2212$5, from 10\u22128 to \u22127", None, -7),
        ("#### \u22127", -7, -7), ("a loss of \u20137, from 10\u20138", None, 8),
        ("#### \u20137", -7, -7), ("#### \uff0d7", -7, -7), ("so \u20137", None, -7),
        ("5*3=15", None, 15), ("#### .7", Decimal("0.7"), Decimal("0.7")),
        ("a share of -$.75", None, Decimal("-0.75")), ("so it is ...7", None, 7),
        ("section 1.2.3", None, 3), ("**18**", None, 18), ("no number", None, None),
        ("9" * 40, None, None),
    ],
)  # fmt: skip
def test_strict_and_lenient(text, strict, lenient):
    scorer = answer_scorer("0.12345")
    found = [answer if isinstance(answer, Decimal | Fraction) else None
             for answer in (scorer.strict(text), scorer.lenient(text))]  # fmt: skip
    assert found == [strict, lenient]


def extraction_seconds(text):
    start = time.process_time()  # other processes on this machine do not count
    scorer = answer_scorer("18")
    assert not scorer.is_right(scorer.strict(text)) or scorer.is_right(scorer.lenient(text))
    return time.process_time() - start


@pytest.mark.parametrize(
    "unit",
    [
        "1", "-", "1,", "####", "#### ", "<answer>", "</answer>", "<answer>1</answer>", "1.", "1.1",
        " ", "$", "*", "%", "\n", "-1", "-$", ",", "#", "<", "####\n", "<<", "1 ", "\u0661",
        "1,111", ",111", "1/", "1e", "\\boxed{", "{", "}", "\\boxed{1}", "\\frac{1}", "\\frac{",
        "<think>",
        "</think>", "\\", "\\text{", ":", "<answer>1", "\u20ac",
    ],
)  # fmt: skip
def test_extraction_is_linear_on_64k_adversarial_characters(unit):
    text = (unit * (1 << 16))[: 1 << 16]
    for candidate in (text, text + "x", "#### " + text, f"<answer>{text}</answer>"):
        # Try three times, because a garbage collection may fall into one of them.
        assert any(extraction_seconds(candidate) < 0.1 for _ in range(3))


# ---------------------------------------------------------------------- Rule-based reward functions
def test_gsm8k_rewards():
    for text in ("#### 18.0", "<answer>18</answer>"):
        assert score("gsm8k_correct", text, "18") == score("gsm8k_format", text, "18") == 1.0
    assert score("gsm8k_correct", "#### 19", "18") == 0 < score("gsm8k_format", "#### 19", "18")
    assert score("gsm8k_correct", "it is 18", "18") == 0.0
    assert score("gsm8k_correct_lenient", "it is 18", "18") == 1.0
    assert score("gsm8k_format", "", "18") == score("gsm8k_correct_lenient", "", "18") == 0.0
    assert score("gsm8k_correct", "#### one", "one") == 1.0  # gold answers may be text
    assert score("gsm8k_correct", "#### 1", "one") == 0.0


@pytest.mark.parametrize(
    ("given", "positions", "inclusion_ordering"),
    [
        ("1 2 3", 1.0, 2.0),
        ("3 2 1", 1 / 3, 1.0),
        ("2 1 3", 1 / 3, 1.5),
        ("1 2", 2 / 3, 2 / 3 + 1 / 2),
        ("", 0.0, 0.0),
        ("1 2 3 3", 3 / 4, 2.0),  # the completion is longer than the answer
        ("1 2 = 3", 2 / 4, 1 + 1 / 3),
        ("9 9 9", 0.0, 1.0),
    ],
)
def test_sort_rewards(given, positions, inclusion_ordering):
    assert score("sort_positions", given, "1 2 3") == pytest.approx(positions)
    assert score("sort_inclusion_ordering", given, "1 2 3") == pytest.approx(inclusion_ordering)
    assert score("exact_match", given, "1 2 3") == float(given == "1 2 3")
    assert score("sort_inclusion_ordering", "2 10", "2 10") == 2.0  # order of numbers, not of texts


def found(name, *, texts=None, lengths=None, **options):
    count = len(texts or lengths)
    columns = {} if lengths is None else {"completion_lengths": lengths}
    rewards = build_rewards([spec(name, **options)])
    result = ask(rewards, ["p"] * count, texts or ["a"] * count, [None] * count, columns)
    return result.total.tolist()


def test_overlong_is_the_papers_and_lengths_and_tags_have_a_price():
    lengths = [0, 79, 80, 81, 90, 99, 100, 101, 1000]
    expected = [0, 0, 0, -1 / 20, -10 / 20, -19 / 20, -1, -1, -1]  # equation 13 of the DAPO paper
    assert found("overlong", lengths=lengths, max_length=100, buffer=20) == pytest.approx(expected)
    whole = found("overlong", lengths=[0, 50, 100], max_length=100, buffer=100)
    assert whole == pytest.approx([0, -0.5, -1])
    assert found("length_penalty", lengths=[0, 1, 200], scale=100) == pytest.approx([0, -0.01, -2])
    assert found("format_tags", texts=["[a]", "[b][a]"], tags=["[a]", "[b]"], per_tag=1.0) == [1, 2]


TAGGED = [  # a completion, and ten times its reward
    ("", 0), ("<think>", 1), ("<think>a</think>", 2), ("<think>a</think><answer>1</answer>", 5),
    ("x <think>a</think> y <answer>1</answer> z", 5),
    ("<answer>1</answer><think>a</think>", 4),  # the tags are in the wrong order
    ("<think>a<think></think><answer>1</answer>", 3),  # <think> occurs twice
    ("<think></answer><answer></think>", 4), ("<THINK>", 0), ("<think>" * 9000, 0),
]  # fmt: skip


def test_a_tenth_per_tag_up_to_a_half():
    texts, tags = zip(*TAGGED, strict=True)
    assert found("format_tags", texts=list(texts)) == pytest.approx([n / 10 for n in tags])


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


# ---------------------------------------------------------------------------------------- RewardSet
def test_weighted_sum():
    rewards = build_rewards([spec("gsm8k_correct", 2.0), spec("gsm8k_format", 0.5)])
    result = ask(rewards, ["q"] * 3, ["#### 18", "#### 1", "18"], ["18"] * 3)
    assert result.total.tolist() == [2.5, 0.5, 0.0] and result.total.dtype == torch.float32
    assert result.per_fn["gsm8k_correct"].tolist() == [1, 0, 0]
    assert result.per_fn["gsm8k_format"].tolist() == [1, 1, 0]
    assert result.reasons == {"gsm8k_correct": {}, "gsm8k_format": {}}
    assert ask(rewards, [], [], []).total.shape == (0,)

    def broken(*, prompts, completions, answers):
        raise KeyError("x")

    exact = WeightedReward("exact_match", 1.0, REWARDS["exact_match"])
    rewards = RewardSet([exact, WeightedReward("watched", 0.0, broken)], max_failures=1.0)
    result = ask(rewards, ["p"], ["a"], ["a"])
    assert result.total.tolist() == [1.0] and result.per_fn["watched"].isnan().all()


def test_a_call_that_fails_loses_its_samples_and_is_logged_once(caplog):
    asked = []

    def touchy(*, prompts, completions, answers):
        asked.append(len(completions))
        if "bad" in completions:
            raise RuntimeError("boom \x1b[31m")
        return [sum(map(len, completions)) / len(completions)] * len(completions)

    rewards = own(touchy, max_failures=1.0)
    for _ in range(2):
        lost = ask(rewards, ["p"] * 4, ["a", "bad", "b", "c"], ["x"] * 4)
        assert lost.total.isnan().all() and lost.reasons == {"f": {"error": 4}}
    assert asked == [4, 4] and rewards.recent == {"f": [(4, 4)] * 2}
    assert ask(rewards, ["p"], ["a"], ["x"]).total.tolist() == [1.0]
    assert caplog.text.count("boom") == 1 and "\x1b" not in caplog.text + rewards.last_error["f"]


def test_a_function_leaves_the_gradient_mode_and_messages_alone():
    def rewrites(*, prompts, completions, answers):
        torch.set_grad_enabled(False)
        prompts.pop()[0]["content"] = "other"
        return [1.0]

    prompts = [[{"role": "user", "content": "question"}]]
    ask(own(rewrites), prompts, ["a"], ["x"])
    assert prompts == [[{"role": "user", "content": "question"}]] and torch.is_grad_enabled()


@pytest.mark.parametrize("kind", [SystemExit, asyncio.CancelledError, KeyboardInterrupt, Stopped])
def test_only_the_user_ends_a_run_from_within_a_function(kind):
    def ends(**_):
        raise kind(2)

    if kind in (SystemExit, asyncio.CancelledError):
        assert ask(own(ends), ["p"], ["a"], ["x"]).reasons == {"f": {"error": 1}}
    else:
        with pytest.raises(kind):
            ask(own(ends), ["p"], ["a"], ["x"])


def test_a_function_for_trl_without_its_convention_gets_a_hint():
    rewards = own(lambda *, completions, **_: [c[0]["content"] for c in completions])
    ask(rewards, ["p"], ["a"], ["x"])
    assert "TypeError" in (said := rewards.last_error["f"]) and "needs convention: trl" in said


NAN = math.nan


@pytest.mark.parametrize(
    ("values", "total", "reasons"),
    [
        # Each function scores one of two tasks. None means that a function does not apply to a
        # sample.
        ([[1, None, 3], [None, 20, 30]], [1, 20, 33], [{}, {}]),
        ([[None, None, 3], [None, 20, None]], [NAN, 20, 3], [{"none_applies": 1}] * 2),
        ([[None] * 3] * 2, [NAN] * 3, [{"none_applies": 3}] * 2),
        # If one function fails for a sample, the sample has no reward, whatever the other returned.
        ([[NAN, None, 3], [10, 20, "x"]], [NAN, 20, NAN], [{"not_a_number": 1}] * 2),
        ([torch.tensor([1.0, 2.0, 3.0]), [None] * 3], [1, 2, 3], [{}, {}]),
    ],
)
def test_none_means_that_a_function_does_not_apply(values, total, reasons):
    first, second = (WeightedReward(name, 1.0, lambda i=i, **_: values[i])
                     for i, name in enumerate("ab"))  # fmt: skip
    watched = WeightedReward("watched", 0.0, lambda **_: [5.0] * 3)
    result = ask(
        RewardSet([first, second, watched], max_failures=1.0), ["p"] * 3, list("xyz"), [""] * 3
    )
    assert str(result.total.tolist()) == str([float(value) for value in total])
    assert [result.reasons[name] for name in "ab"] == reasons
    assert result.per_fn["watched"].tolist() == [5.0] * 3


def test_many_calls_with_none_do_not_end_the_run_unless_no_function_applies():
    rewards = RewardSet([WeightedReward("a", 1.0, lambda **_: [None, 1.0]),
                         WeightedReward("b", 1.0, lambda **_: [2.0, None])])  # fmt: skip
    for _ in range(20):
        assert ask(rewards, ["p"] * 2, ["x"] * 2, [""] * 2).total.tolist() == [2.0, 1.0]
    assert rewards.recent == dict.fromkeys("ab", [(0, 2)] * 10)
    with pytest.raises(RewardError, match="every function returned None for a sample"):
        never = own(lambda **_: [None])
        for _ in range(3):
            ask(never, ["p"], ["x"], [""])


def test_run_ends_above_the_threshold_only():
    failing = iter([1, 1, 1, 1, 4, 4, 4, 4])

    def sometimes(*, prompts, completions, answers):
        bad = next(failing)
        return [math.nan] * bad + [1.0] * (4 - bad)

    rewards = own(sometimes, max_failures=0.5)
    with pytest.raises(RewardError, match=r"f: 16 of the last 28 samples .*not a finite number"):
        while True:
            ask(rewards, ["p"] * 4, ["a"] * 4, ["x"] * 4)
    # The error must come at the 7th call. It is the first call after which more than half of the
    # latest samples have no reward.
    assert next(failing, None) == 4


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: build_rewards([spec("exact_match", math.nan)]), "finite weight for exact_match"),
        (lambda: own(REWARDS["exact_match"], max_failures=2), "max_failures"),
        (
            lambda: ask(build_rewards([spec("exact_match")]), ["p"], ["a", "b"], ["x"]),
            "completions: expected 1, one for each example, got 2",
        ),
    ],
    ids=["weight", "failures", "completions"],
)  # fmt: skip
def test_set_refuses_bad_arguments(call, said):
    with pytest.raises(ValueError, match=said):
        call()


def test_scorers_of_generated_and_open_tasks():
    symbols = scorer_for("sort", Example("q", "1 2", None))
    assert symbols.strict("1  2") == symbols.gold and symbols.strict("") is None
    no_answer = scorer_for("open", Example("q", None, None))
    assert no_answer.gold is None and not no_answer.is_right("x")
    with pytest.raises(ValueError, match="task: expected one of"):
        scorer_for("chess", Example("q", "1", None))
