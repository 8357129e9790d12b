r"""Judge completions in an evaluation. The rule depends on the question's gold answer.

| gold answer                | strict: the marked answer …  | lenient                           |
|----------------------------|------------------------------|-----------------------------------|
| number: 18, 1,080, 1/2     | is exactly that number       | the number at the last mark, or   |
|                            |                              | the last number, is that number   |
| expression: x^2, \sqrt{2}  | is equal, by math-verify     | the marked answer, or the last    |
|                            |                              | line, is equal                    |
| other text                 | is that text                 | the marked answer, or the last    |
|                            |                              | line, is that text except for     |
|                            |                              | case, parentheses and full stops  |
| symbols of a generated task| (no marks) the same symbols  | as strict                         |

An answer is marked by `####`, `<answer>` or `\boxed`. "Strict" accepts only the kinds of marks that
occur in the prompt or in the data's solutions. If none occurs, the full completion must be the
answer. "Lenient" accepts every kind. All comparisons ignore the amount of whitespace.
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Callable, Collection, Hashable, Sequence
from pathlib import Path
from typing import NamedTuple

from grpo_fast.data import TASKS, Example
from grpo_fast.data.answers import (
    BOXED,
    USUAL_MARKS,
    extract_lenient,
    extract_strict,
    final_part,
    marked_content,
    parse_number,
    unwrapped,
)
from grpo_fast.data.example import text_of
from grpo_fast.errors import require
from grpo_fast.rewards import workers
from grpo_fast.rewards.calling import RewardFailure
from grpo_fast.rewards.isolated import IsolatedReward

log = logging.getLogger(__name__)

_WORD = re.compile(r"(?<!\\)(?<![A-Za-z])(?!sqrt|sin|cos|tan|log|exp)[A-Za-z]{3,}")
_MATHEMATICS = re.compile(
    r"[\\^]|sqrt|[A-Za-z]\s*[-+*/=]|[-+*/=]\s*[A-Za-z]|[0-9][A-Za-z](?![A-Za-z])|^[(\[{].*,.*[)\]}]$"
)


class Scorer(NamedTuple):
    """Gold answer of a question, and functions that extract the answer from a completion.

    Attributes:
        strict: returns the answer if the completion has the required format, else None.
        lenient: returns the answer in any format, or None.
        gold: the gold answer, or None if the question has none.
        is_expression: True if the gold answer is a mathematical expression.
    """

    strict: Callable[[str], Hashable | None]
    lenient: Callable[[str], Hashable | None]
    gold: Hashable | None
    is_expression: bool = False

    def is_right(self, answer: Hashable | None) -> bool:
        """Return True if an answer that `strict` or `lenient` extracted equals the gold answer."""
        if answer is None or self.gold is None:
            return False
        return answer == self.gold or (
            self.is_expression and _are_equal(str(answer), str(self.gold))
        )


def scorer_for(task: str, example: Example) -> Scorer:
    """Return the scorer that judges the completions of a question.

    Args:
        task: one of `grpo_fast.data.TASKS`.
        example: the question.
    """
    require(task in TASKS, "task", f"one of {', '.join(TASKS)}", repr(task))
    if task == "sort":
        return Scorer(_symbols, _symbols, example.answer and _symbols(example.answer))
    return answer_scorer(example.answer, _marks_shown(task, example))


def answer_scorer(answer: str | None, marks: Collection[str] = USUAL_MARKS) -> Scorer:
    """Return the scorer for a gold answer.

    Args:
        answer: the gold answer. With None, answers are extracted as text, and all count as wrong.
        marks: kinds of marks that `strict` accepts, a subset of `answers.MARKS`. If empty, the full
            completion is the answer.
    """
    number = None if answer is None else parse_number(answer)
    if number is not None:
        return Scorer(lambda text: extract_strict(text, marks), extract_lenient, number)

    def strict(text: str) -> str | None:
        final = final_part(text)
        return _normal(marked_content(final, marks) if marks else final)

    gold = _normal(answer)

    def lenient(text: str) -> str | None:
        final = final_part(text)
        last_line = next((x for x in final.split("\n")[::-1] if x.strip()), None)
        said = _normal(marked_content(final)) or _normal(last_line)
        is_gold = said and gold and _loose(said) == _loose(gold)
        return gold if is_gold else said

    return Scorer(strict, lenient, gold, answer is not None and is_expression(answer))


def turns(completions: Sequence[str], prefills: Sequence[str] | None) -> list[str]:
    """Return each completion, preceded by its prefill if the prefill contains a tag.

    A prefill is the beginning of the assistant's turn that the prompt already contains.
    """
    pairs = zip(prefills or [""] * len(completions), completions, strict=True)
    return [f"{prefill}{text}" if "<" in prefill else text for prefill, text in pairs]


def shown_answer(answer: Hashable | None) -> str | None:
    """Convert an answer that a scorer extracted to text. None stays None."""
    if answer is None:
        return None
    return " ".join(map(str, answer)) if isinstance(answer, tuple) else str(answer)


def is_expression(answer: str) -> bool:
    """Return True if an answer that is not a number looks like mathematics, not like words."""
    return bool(_MATHEMATICS.search(answer)) and not _WORD.search(answer)


def _marks_shown(task: str, example: Example) -> tuple[str, ...]:
    """Return the kinds of answer marks that occur in an example's prompt or solution."""
    text = f"{text_of(example.prompt)}\n{example.solution or ''}".casefold()
    usual = USUAL_MARKS if task == "gsm8k" or any(mark in text for mark in USUAL_MARKS) else ()
    return (*usual, *([BOXED] if BOXED in text else []))


def _symbols(text: str) -> tuple[str, ...] | None:
    return tuple(text.split()) or None


def _normal(text: str | None) -> str | None:
    return " ".join(unwrapped((text or "").strip()).split()) or None


def _loose(text: str) -> str:
    return text.casefold().strip(" .*()\"'`$")


@functools.lru_cache(maxsize=1 << 16)
def _are_equal(answer: str, gold: str) -> bool:
    columns = {"completions": [f"\\boxed{{{answer}}}"], "answers": [gold]}
    try:
        return _worker()(**columns) == [1.0]
    except RewardFailure as error:
        if "math_verify" in str(error):
            _say_that_it_is_missing()
        return False


@functools.cache
def _worker() -> IsolatedReward:
    path = Path(workers.__file__).with_name("math_answers.py")
    return IsolatedReward(f"{path}:math_equal", timeout=10.0)


@functools.cache
def _say_that_it_is_missing() -> None:
    log.warning("expressions are compared as texts: pip install 'grpo_fast[math]' compares them")
