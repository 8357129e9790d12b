"""Reward functions that check mathematical equality with the package math-verify.

A comparison may never end, so these functions must run in a worker process. The time limits of
math-verify use signals, which only the main thread of a process receives.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from math_verify import LatexExtractionConfig, parse, verify
from math_verify.errors import TimeoutException

ANYWHERE: dict[str, Any] = {}  # math-verify's default order: boxed, LaTeX, then plain numbers
BOXED = {"extraction_config": [LatexExtractionConfig(boxed_match_priority=0)]}


def math_equal(
    *, completions: Sequence[str], answers: Sequence[str], seconds: int = 5
) -> list[float]:
    r"""Return 1 where the expression in \boxed{} or in LaTeX is equal to the answer, else 0.

    Expressions are compared mathematically: `\frac{1}{2}` equals 0.5, `1+x` equals `x+1`, and
    {1, 2} equals {2, 1}.

    Args:
        completions: N completions.
        answers: N gold answers.
        seconds: time limit for one comparison. The reward is NaN if it takes longer.
    """
    pairs = zip(completions, answers, strict=True)
    return [_equal(text, gold, BOXED, seconds, {"strict": True}) for text, gold in pairs]


def math_close(
    *, completions: Sequence[str], answers: Sequence[str], seconds: int = 5, digits: int = 2
) -> list[float]:
    """Return 1 where an expression in the completion is close to the answer, else 0.

    The expression may be anywhere in the completion. An interval equals the tuple of its ends, and
    a relation equals its set of solutions. The names of variables are ignored, so that B equals A:
    do not use this reward for multiple-choice questions.

    Args:
        completions: N completions.
        answers: N gold answers.
        seconds: time limit for one comparison. The reward is NaN if it takes longer.
        digits: number of decimals that are compared. With 2 decimals, 0.001 equals 0.004.
    """
    loose = {"strict": False, "allow_set_relation_comp": True, "float_rounding": digits}
    pairs = zip(completions, answers, strict=True)
    return [_equal(text, gold, ANYWHERE, seconds, loose) for text, gold in pairs]


for _function in (math_equal, math_close):
    _function.per_sample = True  # type: ignore[attr-defined]


def _equal(
    text: str, gold: str, extraction: dict[str, Any], seconds: int, options: dict[str, Any]
) -> float:
    is_marked = "$" in gold or "\\boxed" in gold
    expected = (not is_marked and parse(f"${gold}$")) or parse(gold)
    if not expected:
        raise ValueError(f"answers: expected a mathematical expression, got {gold[:60]!r}")
    try:
        parsed = parse(text, parsing_timeout=seconds, raise_on_error=True, **extraction)
        equal = verify(expected, parsed, timeout_seconds=seconds, raise_on_error=True, **options)
    except TimeoutException:
        return math.nan
    except Exception:  # sympy raises many classes for expressions that it cannot compare
        return 0.0
    return float(equal)
