r"""Find and compare answers. Rewards, evaluations and tables of completions use these functions.

| gold answer                | strict: the marked answer …  | lenient                           |
|----------------------------|------------------------------|-----------------------------------|
| number: 18, 1,080, 1/2     | is that number, or is equal  | the answer is equal, also with a  |
|                            | by math-verify               | unit or a name: 18 eggs, x = 18   |
| expression: x^2, \sqrt{2}  | is equal, by math-verify     | as strict                         |
| letter of a choice: B      | is (B), B., B) 12, Option B  | as strict                         |
| other text                 | is that text                 | the answer is that text except    |
|                            |                              | for case, brackets and full stops |
| symbols of a generated task| (no marks) the same symbols  | as strict                         |

An answer is marked by `####`, `<answer>` or `\boxed`. "Strict" accepts only the kinds of marks that
occur in the prompt or in the data's solutions. If none occurs, the full completion must be the
answer. "Lenient" accepts every kind of mark. Without a mark, it takes the text after "the answer
is", or else the last number (if the gold answer is a number) or the last line. Blanks are ignored
in all comparisons, and the full content of a mark is compared.
"""

from __future__ import annotations

import functools
import itertools
import logging
import math
import re
from collections.abc import Callable, Collection, Hashable
from decimal import Decimal
from typing import NamedTuple

from grpo_fast.data import TASKS, Example, text_of
from grpo_fast.data.answers import (
    BOXED,
    HASHES,
    USUAL_MARKS,
    Number,
    final_part,
    last_latex,
    last_number,
    marked_content,
    parse_number,
    unwrapped,
)
from grpo_fast.errors import require
from grpo_fast.rewards.conventions import RewardFailure
from grpo_fast.rewards.isolated import built_in

warn_once = functools.cache(logging.getLogger(__name__).warning)

LONGEST = 400  # largest number of characters of an answer; longer ones are compared as text
DEEPEST = 10  # largest nesting of brackets; other answers are compared as text
EXPRESSIONS = "mathematics.py:same_expressions"  # worker with math-verify, which may take forever
_SAID = re.compile(r"\b(?:answer|option|choice)(?: is|\**:)[\s:*]*", re.I)
_CHOICE = re.compile(
    r"(?:option |choice )?[(\[*]{0,3}([A-J])(?:[)\].:*]{1,4}(?: .*)?)?", re.S | re.I
)
_WRAPPED = re.compile(r"\\(?:text(?:bf|rm|it)?|mbox|math(?:rm|bf|it|sf)) ?\{([^{}]*)\}")
_WORD = re.compile(r"(?<!\\)(?<![A-Za-z])(?!sqrt|sin|cos|tan|log|exp|[pbv]?matrix)[A-Za-z]{3,}")
_MATHEMATICS = re.compile(
    r"[\\^π√×÷≤≥∞±²³]|sqrt|[A-Za-z]\s*[-+*/=<>]|[-+*/=<>]\s*[A-Za-z]|[0-9][A-Za-z](?![A-Za-z])"
    r"|[0-9]\s*[+*!]|[0-9],\s*-?[0-9]|^[(\[{].*,.*[)\]}]$|\([-+0-9./ ]+\)|\|"
)
# Left sides of `x = 5`, `f(2) = 5`, `total cost = 5` and `2 + 3 = 5`, which only name the answer.
_NAME = re.compile(
    r"[A-Za-z ]+|\\[A-Za-z]+(?: [A-Za-z]{1,3})?|[A-Za-z](?:_[A-Za-z0-9]|\([^()=]{1,9}\))"
    r"|(?:[-0-9 +*/().$,=×÷]|\\times|\\cdot|\\div)+"
)
_UNIT = re.compile(r" ?[A-Za-z][A-Za-z ./'-]*(?:\^(?:[23]|\{[23]\})|[²³])?")
_NO_UNIT = re.compile(
    r"\A ?[A-Za-z]\b|\b(?:pi|half|halves|thirds?|quarters?|dozens?|hundreds?|thousands?"
    r"|[mbtr]+illions?|squared|cubed|times|plus|minus|over|or|sqrt|is|if|not|for)\b"
)
# What follows the answer in "the answer is 12, not 13" and "the answer is B because …".
_REASON = re.compile(r",? (?:because|since|as|so|not|which|where|but|for|while|when|if)\b")
_RELATION = re.compile(r"[<>≠≤≥]|\\(?:[lg]eq?|[lg]t|neq?)\b")
_BLANKS = re.compile(r"\s+|(?<!\\)\\[ ,!;:]|\\q?quad|~")
_SIGNS = str.maketrans({"√": r"\sqrt ", "∞": r"\infty ", "·": r"\cdot ", "²": "^2", "³": "^3",
                        "\u2212": "-", "\u2013": "-", "\uff0d": "-"})  # fmt: skip
_PLAIN = ((r"\left", ""), (r"\right", ""), (r"\%", "%"), (r"\$", ""), (r"\(", ""), (r"\)", ""),
          (r"\[", ""), (r"\]", ""))  # fmt: skip


class Scorer(NamedTuple):
    """Gold answer of a question, and functions that extract the answer from a completion.

    Attributes:
        strict: returns the answer if the completion has the required format, else None.
        lenient: returns the answer in any format, or None.
        gold: the gold answer, or None if the question has none.
    """

    strict: Callable[[str], Hashable | None]
    lenient: Callable[[str], Hashable | None]
    gold: Hashable | None

    def is_right(self, answer: Hashable | None) -> bool:
        """Return True if an answer that `strict` or `lenient` extracted equals the gold answer."""
        if answer is None or self.gold is None:
            return False
        is_symbols = isinstance(self.gold, tuple)
        return answer == self.gold or (not is_symbols and compare(str(answer), str(self.gold)) == 1)


def scorer_for(task: str, example: Example) -> Scorer:
    """Return the scorer that judges the completions of a question.

    Args:
        task: one of `grpo_fast.data.TASKS`.
        example: the question.
    """
    require(task in TASKS, "task", f"one of {', '.join(TASKS)}", repr(task))
    if task == "sort":
        return Scorer(_symbols, _symbols, example.answer and _symbols(example.answer))
    text = f"{text_of(example.prompt)}\n{example.solution or ''}".casefold()
    usual = USUAL_MARKS if task == "gsm8k" or any(mark in text for mark in USUAL_MARKS) else ()
    return answer_scorer(example.answer, (*usual, *([BOXED] if BOXED in text else [])))


def answer_scorer(answer: str | None, marks: Collection[str] = USUAL_MARKS) -> Scorer:
    """Return the scorer for a gold answer.

    Args:
        answer: the gold answer. With None, answers are extracted as text, and all count as wrong.
        marks: kinds of marks that `strict` accepts, a subset of `answers.MARKS`. If empty, the full
            completion is the answer.
    """
    gold = _read(answer)

    def strict(text: str) -> Hashable | None:
        final = final_part(text)
        return _read(marked_content(final, marks) if marks else final)

    def lenient(text: str) -> Hashable | None:
        said = likely_answer(final_part(text), answer or "")
        is_gold = said and answer and compare(said, answer, loose=True) == 1
        return gold if is_gold else _read(said, loose=True)

    return Scorer(strict, lenient, gold)


def shown_answer(answer: Hashable | None) -> str | None:
    """Convert an answer that a scorer extracted to text. None stays None."""
    if answer is None:
        return None
    return " ".join(map(str, answer)) if isinstance(answer, tuple) else str(answer)


# ------------------------------------------------------------------------------ find the answer
def likely_answer(final: str, gold: str) -> str | None:
    """Return the answer in a text of any format, or None if there is none.

    Args:
        final: a completion without its thoughts.
        gold: the gold answer, which says whether to look for a number or an expression.
    """
    is_number = _number(gold, loose=True) is not None
    content = (marked_content(final) or "").strip()
    # A line with `####` in the middle of a text may be a heading.
    is_heading = final.rstrip().rfind("\n") > final.rfind(HASHES) >= 0
    if content and not (is_number and is_heading and _number(content, loose=True) is None):
        return content
    said = _SAID.split(final)
    if len(said) > 1:
        content = said[-1].partition("\n")[0].partition(". ")[0].rstrip(" *")
        content = _REASON.split(content, maxsplit=1)[0]
        if not is_number or _number(content, loose=True) is not None or is_expression(content):
            return content
    latex = last_latex(final)
    if latex and is_expression(latex) and last_number(final.rpartition(latex)[2]) is None:
        return latex
    if is_number:
        return last_number(final)
    lines = [line for line in final.split("\n") if line.strip()]
    return lines[-1] if lines else None


def is_expression(answer: str) -> bool:
    """Return True if an answer that is not a number looks like mathematics, not like words."""
    fits = len(answer) <= LONGEST and not _WORD.search(answer)
    return fits and bool(_MATHEMATICS.search(answer))


# --------------------------------------------------------------------------------- compare answers
def compare(answer: str, gold: str, *, loose: bool = False, seconds: int = 5) -> float:
    """Return 1 if an answer equals the gold answer, else 0.

    Numbers are compared first, then letters of a choice, texts without blanks, and expressions.

    Args:
        answer: the answer of a completion.
        gold: the gold answer.
        loose: if True, ignore units, case, and brackets around words.
        seconds: time limit for a comparison of expressions.

    Returns:
        1.0 or 0.0, or NaN if the comparison took longer than the time limit.
    """
    # 1. Compare numbers. One of them may have a unit that the other lacks.
    said = _number(answer)
    expected = _number(gold)
    if said is None and expected is not None:
        said = _number(answer, loose)
    elif said is not None and expected is None:
        expected = _number(gold, loose)
    if said is not None and expected is not None:
        return float(said == expected)
    # 2. Compare the letters of a choice, and texts.
    texts = [_normal(text, loose) for text in (answer, gold)]
    letters = [_CHOICE.fullmatch(text) for text in texts]
    if letters[0] and letters[1]:
        return float(letters[0][1].upper() == letters[1][1].upper())
    bare = [text.replace(" ", "") for text in texts]
    if loose and len(bare[1]) > 1 and not is_expression(texts[1]):
        bare = [text.casefold().strip(".*()\"'`") for text in bare]
    if bare[0] == bare[1]:
        return float(bool(bare[0]))
    # 3. Compare expressions.
    if expected is not None and _RELATION.search(texts[0]):
        return 0.0
    if "=" in texts[0] and "=" not in texts[1]:
        name, _, texts[0] = texts[0].rpartition("=")
        if not _NAME.fullmatch(name.strip()):
            return 0.0
    for i, number in enumerate((said, expected)):
        if number is not None:
            texts[i] = f"{number:f}" if isinstance(number, Decimal) else str(number)
        elif not is_expression(texts[i]) or not _is_shallow(texts[i]):
            return 0.0
    return _same_expressions(texts[0], texts[1], seconds)


def _read(text: str | None, loose: bool = False) -> Number | str | None:
    """Return the number in an answer, or its text, or None if it is empty."""
    if text is None:
        return None
    number = _number(text, loose)
    return number if number is not None else _normal(text) or None


def _number(text: str, loose: bool = False) -> Number | None:
    """Return the number in `42`, `x = 42` or `5 * 3 = 15`, and with `loose` in `42 eggs`."""
    number = parse_number(text)
    if number is not None or len(text) > LONGEST:
        return number
    name, equals, right = _normal(text, loose).rpartition("=")
    if equals and not _NAME.fullmatch(name.strip()):
        return None
    unit = re.search("[A-Za-z]", right) if loose else None
    if unit and _UNIT.fullmatch(right, unit.start()) and not _NO_UNIT.search(right[unit.start() :]):
        right = right[: unit.start()]
    return parse_number(right)


def _normal(text: str, loose: bool = False) -> str:
    """Return an answer without dollar signs, LaTeX for text, and blanks that do not matter."""
    if len(text) <= LONGEST:
        text = _WRAPPED.sub(r"\1", text).translate(_SIGNS)
        for latex, plain in _PLAIN:
            text = text.replace(latex, plain)
        if loose:
            text = _SAID.split(text)[-1]
        text = _BLANKS.sub(" ", text)
    return " ".join(unwrapped(text.strip("$ \t\r\n").removesuffix(".")).split()).strip("$ ")


def _is_shallow(text: str) -> bool:
    """Return True if all braces are closed, and no more than DEEPEST brackets are nested."""
    # An opening bracket counts as 1, and a closing bracket as -1.
    steps = [(character in "([{") - (character in ")]}") for character in text]
    depths = list(itertools.accumulate(steps, initial=0))
    return depths[-1] == 0 and min(depths) >= 0 and max(depths) <= DEEPEST


@functools.lru_cache(maxsize=1 << 14)
def _same_expressions(answer: str, gold: str, seconds: int) -> float:
    try:
        [equal] = built_in(EXPRESSIONS)(completions=[answer], answers=[gold], seconds=seconds)
    except RewardFailure as error:
        if "math_verify" not in str(error):
            return math.nan
        warn_once("expressions are compared as texts: pip install 'grpo_fast[math]' compares them")
        return 0.0
    return math.nan if equal is None else float(equal)


def _symbols(text: str) -> tuple[str, ...] | None:
    return tuple(text.split()) or None
