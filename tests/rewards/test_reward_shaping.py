"""Length and format rewards against sums written out by hand in fractions."""

from __future__ import annotations

from fractions import Fraction

import pytest

from grpo_fast.rewards import build_rewards
from tests.reward_specs import spec


def found(name, *, texts=None, lengths=None, **options):
    count = len(texts or lengths)
    columns = {} if lengths is None else {"completion_lengths": lengths}
    rewards = build_rewards([spec(name, **options)])
    result = rewards(["p"] * count, texts or ["a"] * count, [None] * count, columns)
    return result.total.tolist()


def punishment(length, longest, cache):
    """DAPO's equation 13, with its three cases."""
    if length <= longest - cache:
        return Fraction(0)
    if length <= longest:
        return Fraction(longest - cache - length, cache)
    return Fraction(-1)


def test_overlong_is_the_papers():
    lengths = [0, 1, 79, 80, 81, 90, 99, 100, 101, 1000]
    expected = [float(punishment(n, 100, 20)) for n in lengths]
    assert found("overlong", lengths=lengths, max_length=100, buffer=20) == pytest.approx(expected)
    assert expected[4] == -1 / 20 and expected[7] == -1
    whole = found("overlong", lengths=[0, 50, 100], max_length=100, buffer=100)
    assert whole == pytest.approx([0, -0.5, -1])


def test_length_penalty():
    assert found("length_penalty", lengths=[0, 1, 200], scale=100) == pytest.approx([0, -0.01, -2])


@pytest.mark.parametrize(
    ("text", "tags"),
    [
        ("", 0),
        ("<think>", 1),
        ("<think>a</think>", 2),
        ("<think>a</think><answer>1</answer>", 5),
        ("x <think>a</think> y <answer>1</answer> z", 5),
        ("<answer>1</answer><think>a</think>", 4),  # the other way round
        ("<think>a<think></think><answer>1</answer>", 3),  # one of them twice
        ("<think></answer><answer></think>", 4),
        ("<THINK>", 0),
        ("<think>" * 9000, 0),
    ],
)
def test_a_tenth_per_tag_up_to_a_half(text, tags):
    assert found("format_tags", texts=[text]) == pytest.approx([tags / 10])


def test_other_tags_at_another_price():
    assert found("format_tags", texts=["[a]", "[b][a]"], tags=["[a]", "[b]"], per_tag=1.0) == [1, 2]


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
