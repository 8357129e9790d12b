"""Rule rewards for questions whose answer is a number. Each returns one float per completion, 0 or 1."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from decimal import Decimal

from grpo_fast.rewards.extract import extract_lenient, extract_strict, parse_number


def gsm8k_correct(*, prompts: Sequence[str], completions: Sequence[str], answers: Sequence[str]) -> list[float]:
    """1 where the answer given in the required format is the gold number (strict: the format is part of it)."""
    return _correct(extract_strict, completions, answers)


def gsm8k_correct_lenient(*, prompts: Sequence[str], completions: Sequence[str], answers: Sequence[str]) -> list[float]:
    """1 where the final number of the completion, in any format, is the gold number."""
    return _correct(extract_lenient, completions, answers)


def gsm8k_format(*, prompts: Sequence[str], completions: Sequence[str], answers: Sequence[str]) -> list[float]:
    """1 where the last `####` or `<answer>…</answer>` of the completion holds a number, right or wrong."""
    return [float(extract_strict(text) is not None) for text in completions]


def gold_number(answer: str) -> Decimal:
    """The gold answer as a number. Raises ValueError when it is none: a fault of the data, not of the policy."""
    number = parse_number(answer)
    if number is None:
        raise ValueError(f"answers: expected a number of at most 32 digits, got {answer[:60]!r}")
    return number


def _correct(
    extract: Callable[[str], Decimal | None], completions: Sequence[str], answers: Sequence[str]
) -> list[float]:
    return [float(extract(text) == gold_number(gold)) for text, gold in zip(completions, answers, strict=True)]
