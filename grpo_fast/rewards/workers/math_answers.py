"""Mathematical equality by the package math-verify, which may take forever: run in a worker.

Its time limits are signals, which only the main thread of a process gets. An expression that cannot
be compared within `seconds` is NaN: the sample has no reward.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from math_verify import LatexExtractionConfig, parse, verify
from math_verify.errors import TimeoutException

ANYWHERE: dict[str, Any] = {}  # math-verify's own order: boxed, LaTeX, then plain numbers
BOXED = {"extraction_config": [LatexExtractionConfig(boxed_match_priority=0)]}


def math_equal(
    *, completions: Sequence[str], answers: Sequence[str], seconds: int = 5
) -> list[float]:
    r"""1 where what the completion has in \boxed{} or in LaTeX is equal to the answer.

    Equal as expressions: `\frac{1}{2}` is 0.5, `1+x` is `x+1`, {1, 2} is {2, 1}.
    """
    pairs = zip(completions, answers, strict=True)
    return [_equal(text, gold, BOXED, seconds, {"strict": True}) for text, gold in pairs]


def math_close(
    *, completions: Sequence[str], answers: Sequence[str], seconds: int = 5, digits: int = 2
) -> list[float]:
    """1 where an expression anywhere in the completion is the answer to so many decimal digits.

    Intervals and tuples, relations and their sets, and names of variables are taken for one.
    """
    loose = {"strict": False, "allow_set_relation_comp": True, "float_rounding": digits}
    pairs = zip(completions, answers, strict=True)
    return [_equal(text, gold, ANYWHERE, seconds, loose) for text, gold in pairs]


for _function in (math_equal, math_close):
    _function.per_sample = True  # type: ignore[attr-defined]


def _equal(text: str, gold: str, where: dict[str, Any], seconds: int, how: dict[str, Any]) -> float:
    is_marked = "$" in gold or "\\boxed" in gold
    expected = (not is_marked and parse(f"${gold}$")) or parse(gold)
    if not expected:
        raise ValueError(f"answers: expected a mathematical expression, got {gold[:60]!r}")
    try:
        parsed = parse(text, parsing_timeout=seconds, raise_on_error=True, **where)
        equal = verify(expected, parsed, timeout_seconds=seconds, raise_on_error=True, **how)
    except TimeoutException:
        return math.nan
    except Exception:  # sympy has no class of its own for what it cannot compare
        return 0.0
    return float(equal)
