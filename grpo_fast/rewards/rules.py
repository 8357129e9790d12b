"""Reward functions with fixed rules, for the answer, the format and the length of completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from grpo_fast.data.answers import (
    USUAL_MARKS,
    final_part,
    last_latex,
    marked_content,
    parse_number,
    turns,
)
from grpo_fast.errors import require
from grpo_fast.rewards.isolated import built_in
from grpo_fast.rewards.scoring import answer_scorer, compare

Texts = Sequence[str]
TAGS = ("<think>", "</think>", "<answer>", "</answer>")
GYM_SCORES = "gym_scores.py:scores"


# --------------------------------------------------------------------------------- Numbers (GSM8K)
def gsm8k_correct(
    *, completions: Texts, answers: Texts, prefills: Texts | None = None
) -> list[float]:
    """Return 1 where the answer after `####` or in `<answer>` equals the gold answer, else 0."""
    pairs = zip(map(answer_scorer, answers), turns(completions, prefills), strict=True)
    return [float(scorer.is_right(scorer.strict(text))) for scorer, text in pairs]


def gsm8k_correct_lenient(
    *, completions: Texts, answers: Texts, prefills: Texts | None = None
) -> list[float]:
    """Return 1 where the final answer, in any format, equals the gold answer, else 0."""
    pairs = zip(map(answer_scorer, answers), turns(completions, prefills), strict=True)
    return [float(scorer.is_right(scorer.lenient(text))) for scorer, text in pairs]


def gsm8k_format(*, completions: Texts, prefills: Texts | None = None) -> list[float]:
    """Return 1 where the last `####` or `<answer>…</answer>` contains a number, else 0."""
    return [float(_has_number(text)) for text in turns(completions, prefills)]


def _has_number(text: str) -> bool:
    content = marked_content(final_part(text), USUAL_MARKS)
    return content is not None and parse_number(content) is not None


def math_equal(
    *, completions: Texts, answers: Texts, prefills: Texts | None = None, seconds: int = 5
) -> list[float]:
    r"""Return 1 where the marked answer, or the last LaTeX, is equal to the gold answer, else 0.

    Expressions are compared mathematically: `\frac{1}{2}` equals 0.5, `1+x` equals `x+1`, and
    {1, 2} equals {2, 1}. Units and letters of choices are compared as in lenient accuracy.

    Args:
        completions: N completions.
        answers: N gold answers.
        prefills: the beginnings of the assistant's turns that the prompts contain.
        seconds: time limit for one comparison. The reward is NaN if it takes longer.
    """
    values = []
    for text, gold in zip(turns(completions, prefills), answers, strict=True):
        final = final_part(text)
        said = marked_content(final) or last_latex(final) or ""
        values.append(compare(said, gold, loose=True, seconds=seconds))
    return values


# ------------------------------------------------------------------------------- reasoning-gym
def reasoning_gym(
    *, completions: Texts, entry: Sequence[Mapping[str, Any]], prefills: Texts | None = None
) -> list[float]:
    """Return the score of each answer, from 0 to 1, by reasoning-gym's scorer of the question.

    The scorer gets the marked answer of a completion (`####`, `<answer>` or a LaTeX box), or
    without a mark all text after the thoughts. Many scorers give a part of the score to an answer
    that is not right.

    Args:
        completions: N completions.
        entry: N entries of reasoning-gym, the column of `data=reasoning_gym:NAME`.
        prefills: the beginnings of the assistant's turns that the prompts contain.
    """
    finals = [final_part(text) for text in turns(completions, prefills)]
    answers = [final if (x := marked_content(final)) is None else x for final in finals]
    worker = built_in(GYM_SCORES, timeout=120.0)
    return worker(completions=[x.strip() for x in answers], entries=list(entry))


# ------------------------------------------------- Symbols separated by blanks (CS336 lecture)
def sort_positions(*, completions: Texts, answers: Texts) -> list[float]:
    """Return the fraction of positions at which a completion has the right symbol.

    The denominator is the number of symbols of the completion or of the answer, whichever is
    larger.
    """
    return [
        sum(a == b for a, b in zip(symbols, gold, strict=False)) / max(len(symbols), len(gold), 1)
        for symbols, gold in _symbol_pairs(completions, answers)
    ]


def sort_inclusion_ordering(*, completions: Texts, answers: Texts) -> list[float]:
    """Return the sum of two fractions for each completion, between 0 and 2.

    The first is the fraction of the gold answer's symbols that occur in the completion. As in the
    lecture, repetitions do not matter, so the completion `0 0 1` gets 1 for the answer `0 1 1`. The
    second is the fraction of adjacent pairs of the completion that are in order. A pair with a
    symbol that is not a number is not in order. The denominator is the number of pairs of the
    completion or of the answer, whichever is larger, so that a completion gains nothing by being
    too short. It gains by being too long: all symbols in order (`0 1 2 … 9`) get 2 for every
    answer. Limit the length to that of the answer, as the recipes do.
    """
    return [_inclusion_ordering(*pair) for pair in _symbol_pairs(completions, answers)]


def exact_match(*, completions: Texts, answers: Texts) -> list[float]:
    """Return 1 where the completion equals the answer, ignoring whitespace, else 0."""
    return [float(symbols == gold) for symbols, gold in _symbol_pairs(completions, answers)]


def _symbol_pairs(completions: Texts, answers: Texts) -> list[tuple[list[str], list[str]]]:
    pairs = zip(completions, answers, strict=True)
    return [(text.split(), gold.split()) for text, gold in pairs]


def _inclusion_ordering(symbols: list[str], gold: list[str]) -> float:
    present = set(symbols)
    included = sum(symbol in present for symbol in gold) / (len(gold) or 1)
    count = max(len(symbols), len(gold)) - 1
    if count <= 0:
        return included + float(symbols == gold)
    # Limit the length. For thousands of digits, int() is slow, and then raises an error.
    numbers = [int(s) if s.isascii() and s.isdigit() and len(s) <= 9 else None for s in symbols]
    pairs = zip(numbers, numbers[1:], strict=False)
    ordered = sum(a is not None and b is not None and a <= b for a, b in pairs)
    return included + ordered / count


# ------------------------------------------------------------------------ Length, tags and words
def length_penalty(*, completion_lengths: Sequence[int], scale: float) -> list[float]:
    """Return −(number of tokens) / scale for each completion."""
    require(scale > 0, "scale", "a number above 0", scale)
    return [-length / scale for length in completion_lengths]


def overlong(*, completion_lengths: Sequence[int], max_length: int, buffer: int) -> list[float]:
    """Return the soft overlong punishment of DAPO (arXiv 2503.14476, equation 13).

    The reward is 0 up to `max_length` − `buffer` tokens, and then falls linearly to −1 at
    `max_length`.
    """
    expected = f"a number above 0, at most max_length = {max_length}"
    require(0 < buffer <= max_length, "buffer", expected, buffer)
    free = max_length - buffer
    return [-min(max(length - free, 0) / buffer, 1.0) for length in completion_lengths]


def format_tags(
    *, completions: Texts, prefills: Texts | None = None, tags: Texts = TAGS,
    per_tag: float = 0.1, number: bool = False,
) -> list[float]:  # fmt: skip
    """Return `per_tag` for each tag that occurs exactly once, plus `per_tag` for the right order.

    With the default tags, the reward is between 0 and 0.5.

    Args:
        completions: N completions.
        prefills: the beginnings of the assistant's turns that the prompts contain. Their tags
            count, too.
        tags: the tags in the right order.
        per_tag: reward for each tag.
        number: if True, the last `per_tag` is for an answer that is a number, and not for the order
            of the tags.
    """
    return [per_tag * _tag_count(text, tags, number) for text in turns(completions, prefills)]


def distinct_words(*, completions: Texts) -> list[float]:
    """Return the fraction of a completion's words that are distinct, to punish repetition.

    Case is ignored. The reward of a completion without words is 0.
    """
    words = [text.casefold().split() for text in completions]
    return [len(set(each)) / max(len(each), 1) for each in words]


def _tag_count(text: str, tags: Texts, number: bool) -> int:
    places = [text.find(tag) for tag in tags if text.count(tag) == 1]
    if number:
        return len(places) + _has_number(text)
    return len(places) + (len(places) == len(tags) and places == sorted(places))
