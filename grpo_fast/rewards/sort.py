"""Rewards for generated tasks, whose texts are symbols separated by blanks (CS336's sorting lecture)."""

from __future__ import annotations

from collections.abc import Sequence


def sort_positions(*, prompts: Sequence[str], completions: Sequence[str], answers: Sequence[str]) -> list[float]:
    """Positions that hold the right symbol, divided by n. Symbols beyond n count against it: / max(n, given)."""
    return [_positions(text.split(), gold.split()) for text, gold in zip(completions, answers, strict=True)]


def sort_inclusion_ordering(
    *, prompts: Sequence[str], completions: Sequence[str], answers: Sequence[str]
) -> list[float]:
    """Fraction of the prompt's symbols that occur + fraction of adjacent pairs in order: 0 … 2.

    As in the lecture a symbol is included if it occurs at all, so `0 0 1` gets the full score for `0 1 1`. The answer
    holds exactly the prompt's symbols and stands for the prompt here. A pair with anything that is no number is out of
    order, and the pairs in order are divided by those of the longer of completion and answer, so that neither one
    symbol nor an endless tail is rewarded.
    """
    return [_inclusion_ordering(text.split(), gold.split()) for text, gold in zip(completions, answers, strict=True)]


def exact_match(*, prompts: Sequence[str], completions: Sequence[str], answers: Sequence[str]) -> list[float]:
    """1 where the completion is the answer, blanks aside."""
    return [float(text.split() == gold.split()) for text, gold in zip(completions, answers, strict=True)]


def _positions(given: list[str], gold: list[str]) -> float:
    right = sum(a == b for a, b in zip(given, gold, strict=False))
    return right / max(len(given), len(gold), 1)


def _inclusion_ordering(given: list[str], gold: list[str]) -> float:
    present = set(given)
    included = sum(symbol in present for symbol in gold) / max(len(gold), 1)
    pairs = max(len(given), len(gold)) - 1
    if pairs <= 0:
        return included + float(given == gold)
    numbers = [int(s) if s.isascii() and s.isdigit() and len(s) <= 9 else None for s in given]
    ordered = sum(a is not None and b is not None and a <= b for a, b in zip(numbers, numbers[1:], strict=False))
    return included + ordered / pairs
