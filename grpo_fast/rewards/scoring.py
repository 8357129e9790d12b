"""How a task tells right from wrong in an evaluation: answers that can be compared, found strictly or leniently."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

from grpo_fast.rewards.extract import extract_lenient, extract_strict, parse_number
from grpo_fast.rewards.gsm8k import gold_number


class Scorer(NamedTuple):
    """`strict` and `lenient` read an answer out of a completion (None: none found), `gold` reads the right one."""

    strict: Callable[[str], Hashable | None]
    lenient: Callable[[str], Hashable | None]
    gold: Callable[[str], Hashable | None]


def number_scorer() -> Scorer:
    """GSM8K: strict needs `####` or `<answer>`, lenient takes the final number of the text."""
    return Scorer(extract_strict, extract_lenient, gold_number)


def symbol_scorer() -> Scorer:
    """Generated tasks: the symbols must agree one by one, strictly and leniently alike."""
    return Scorer(_symbols, _symbols, lambda answer: tuple(answer.split()))


def text_scorer() -> Scorer:
    """Free text, blanks normalised: the whole completion (strict) or its last non-empty line (lenient)."""
    return Scorer(_normal, _last_line, _normal)


def scorer_for(task: str, answers: Sequence[str] = ()) -> Scorer:
    """The scorer of a task of `grpo_fast.data.TASKS`; for "jsonl" a number scorer where all `answers` are numbers."""
    makers = {"gsm8k": number_scorer, "sort": symbol_scorer, "arithmetic": symbol_scorer, "jsonl": text_scorer}
    if task not in makers:
        raise ValueError(f"task: expected one of {', '.join(makers)}, got {task!r}")
    if task == "jsonl" and answers and all(parse_number(answer) is not None for answer in answers):
        return number_scorer()
    return makers[task]()


def _symbols(text: str) -> tuple[str, ...] | None:
    return tuple(text.split()) or None


def _normal(text: str) -> str | None:
    return " ".join(text.split()) or None


def _last_line(text: str) -> str | None:
    lines = [line for line in text.splitlines() if line.strip()]
    return _normal(lines[-1]) if lines else None
