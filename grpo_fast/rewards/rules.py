"""Rewards by rules: right and wrong, the form of a completion; and how an evaluation judges."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from decimal import Decimal
from typing import NamedTuple

from grpo_fast.data import TASKS
from grpo_fast.errors import require
from grpo_fast.rewards.extract import extract_lenient, extract_strict, parse_number

Texts = Sequence[str]
TAGS = ("<think>", "</think>", "<answer>", "</answer>")


# ------------------------------------------------------------------------------- numbers (GSM8K)
def gsm8k_correct(*, completions: Texts, answers: Texts) -> list[float]:
    """1 where the answer in the required format is the gold number (the format is part of it)."""
    return _correct(extract_strict, completions, answers)


def gsm8k_correct_lenient(*, completions: Texts, answers: Texts) -> list[float]:
    """1 where the final number of the completion, in any format, is the gold number."""
    return _correct(extract_lenient, completions, answers)


def gsm8k_format(*, completions: Texts) -> list[float]:
    """1 where the last `####` or `<answer>…</answer>` holds a number, right or wrong."""
    return [float(extract_strict(text) is not None) for text in completions]


def gold_number(answer: str) -> Decimal:
    """The gold answer as a number. Raises ValueError for any other text: a fault of the data."""
    number = parse_number(answer)
    require(number is not None, "answers", "a number of at most 32 digits", repr(answer[:60]))
    return number


def _correct(
    extract: Callable[[str], Decimal | None], completions: Texts, answers: Texts
) -> list[float]:
    pairs = zip(completions, answers, strict=True)
    return [float(extract(text) == gold_number(gold)) for text, gold in pairs]


# -------------------------------------------------- symbols separated by blanks (CS336's lecture)
def sort_positions(*, completions: Texts, answers: Texts, scaled: bool = True) -> list[float]:
    """Positions that hold the right symbol / n; with more than n symbols, / their number.

    Not `scaled`: the same times n, the lecture's count of right positions.
    """
    rewards = []
    for symbols, gold in _symbol_pairs(completions, answers):
        right = sum(a == b for a, b in zip(symbols, gold, strict=False))
        share = right / max(len(symbols), len(gold), 1)
        rewards.append(share * (1 if scaled else len(gold)))
    return rewards


def sort_inclusion_ordering(
    *, completions: Texts, answers: Texts, scaled: bool = True
) -> list[float]:
    """Fraction of the prompt's symbols that occur + fraction of adjacent pairs in order: 0 … 2.

    Not `scaled`: n times the first + (n − 1) times the second, the lecture's points.

    As in the lecture a symbol is included if it occurs at all, so `0 0 1` gets the full score for
    `0 1 1`. The answer holds exactly the prompt's symbols and stands for the prompt here. A pair
    with anything that is no number is out of order, and the pairs in order are divided by those of
    the longer of completion and answer: neither one symbol nor an endless tail is rewarded.
    """
    return [_inclusion_ordering(*pair, scaled) for pair in _symbol_pairs(completions, answers)]


def exact_match(*, completions: Texts, answers: Texts) -> list[float]:
    """1 where the completion is the answer, blanks aside."""
    return [float(symbols == gold) for symbols, gold in _symbol_pairs(completions, answers)]


def _symbol_pairs(completions: Texts, answers: Texts) -> list[tuple[list[str], list[str]]]:
    pairs = zip(completions, answers, strict=True)
    return [(text.split(), gold.split()) for text, gold in pairs]


def _inclusion_ordering(symbols: list[str], gold: list[str], scaled: bool) -> float:
    present = set(symbols)
    included = sum(symbol in present for symbol in gold) / (len(gold) or 1 if scaled else 1)
    count = max(len(symbols), len(gold)) - 1
    if count <= 0:
        return included + float(symbols == gold)
    # A longer text may be made of thousands of digits, which `int` reads slowly and then refuses.
    numbers = [int(s) if s.isascii() and s.isdigit() and len(s) <= 9 else None for s in symbols]
    pairs = zip(numbers, numbers[1:], strict=False)
    ordered = sum(a is not None and b is not None and a <= b for a, b in pairs)
    return included + ordered / count * (1 if scaled else max(len(gold) - 1, 1))


# ------------------------------------------------------------- the form: length, tags and words
def length_penalty(*, completion_lengths: Sequence[int], scale: float) -> list[float]:
    """−length / scale, in tokens: a completion of `scale` of them loses 1."""
    require(scale > 0, "scale", "a number above 0", scale)
    return [-length / scale for length in completion_lengths]


def overlong(*, completion_lengths: Sequence[int], max_length: int, buffer: int) -> list[float]:
    """DAPO's soft overlong punishment (2503.14476, eq. 13), 0 … −1.

    0 up to `max_length` − `buffer` tokens, from there falling linearly to −1 at `max_length`.
    """
    expected = f"a number above 0, at most max_length = {max_length}"
    require(0 < buffer <= max_length, "buffer", expected, buffer)
    free = max_length - buffer
    return [-min(max(length - free, 0) / buffer, 1.0) for length in completion_lengths]


def format_tags(
    *, completions: Texts, tags: Texts = TAGS, per_tag: float = 0.1, number: bool = False
) -> list[float]:
    """`per_tag` for each tag that stands there exactly once, and once more for all in their order,
    or with `number` for a number as the answer.

    With the four tags of a thought and an answer that is 0 … 0.5.
    """
    return [per_tag * _tag_count(text, tags, number) for text in completions]


def distinct_words(*, completions: Texts) -> list[float]:
    """Different words / all words, case aside; 0 without a word. It punishes repetition."""
    words = [text.casefold().split() for text in completions]
    return [len(set(each)) / max(len(each), 1) for each in words]


def _tag_count(text: str, tags: Texts, number: bool) -> int:
    places = [text.find(tag) for tag in tags if text.count(tag) == 1]
    if number:
        return len(places) + (extract_strict(text) is not None)
    return len(places) + (len(places) == len(tags) and places == sorted(places))


# ------------------------------------------------------------------------------------ evaluation
class Scorer(NamedTuple):
    """How a task's answers are read in an evaluation; None: there is no answer in the text."""

    strict: Callable[[str], Hashable | None]  # reads an answer out of a completion
    lenient: Callable[[str], Hashable | None]
    gold: Callable[[str], Hashable | None]  # reads the right one


def scorer_for(task: str, answers: Texts = ()) -> Scorer:
    """The scorer of a task of `grpo_fast.data.TASKS`.

    gsm8k, and jsonl where all `answers` are numbers: strict needs `####` or `<answer>`, lenient
    takes the final number of the text. Generated tasks: the symbols must agree one by one. Other
    jsonl: the whole completion (strict) or its last non-empty line (lenient), blanks normalised.
    """
    require(task in TASKS, "task", f"one of {', '.join(TASKS)}", repr(task))
    if task in ("sort", "arithmetic"):
        return Scorer(_symbols, _symbols, _symbols)
    is_text = not answers or any(parse_number(answer) is None for answer in answers)
    if task == "open" or (task == "jsonl" and is_text):
        return Scorer(_normal, _last_line, _normal)
    return Scorer(extract_strict, extract_lenient, gold_number)


def _symbols(text: str) -> tuple[str, ...] | None:
    return tuple(text.split()) or None


def _normal(text: str) -> str | None:
    return " ".join(text.split()) or None


def _last_line(text: str) -> str | None:
    lines = [line for line in text.splitlines() if line.strip()]
    return _normal(lines[-1]) if lines else None
