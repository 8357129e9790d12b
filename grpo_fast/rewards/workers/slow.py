"""Functions that may never end, and therefore run in a worker process.

A search with a regular expression and a comparison by sympy may take forever. The time limits of
math-verify use signals, which only the main thread of a process receives.
"""

from __future__ import annotations

import re
from collections.abc import Sequence


def format_pattern(*, completions: Sequence[str], pattern: str, whole: bool = False) -> list[float]:
    """Return 1 where the completion contains the pattern, else 0.

    Args:
        completions: N completions.
        pattern: regular expression, in which a dot also matches a line end.
        whole: if True, the pattern must match the full completion.
    """
    compiled = re.compile(pattern, re.DOTALL)
    find = compiled.fullmatch if whole else compiled.search
    return [float(find(text) is not None) for text in completions]


format_pattern.per_sample = True  # type: ignore[attr-defined]


def same_expressions(
    *, completions: Sequence[str], answers: Sequence[str], seconds: int, digits: int | None
) -> list[float | None]:
    """Return 1 where two LaTeX expressions are equal, else 0, or None if it takes too long.

    Args:
        completions: N expressions.
        answers: N gold expressions.
        seconds: time limit for one comparison.
        digits: number of decimals that are compared. If it is a number, the names of variables do
            not matter, an interval equals the tuple of its ends, and a relation equals its set of
            solutions.
    """
    from math_verify import parse, verify
    from math_verify.errors import TimeoutException

    options = {} if digits is None else {"strict": False, "allow_set_relation_comp": True}
    limits = {"raise_on_error": True, "float_rounding": 6 if digits is None else digits}
    found: list[float | None] = []
    for pair in zip(completions, answers, strict=True):
        try:
            said, gold = [
                parse(f"${x}$", parsing_timeout=seconds, raise_on_error=True) for x in pair
            ]
            found.append(float(verify(gold, said, timeout_seconds=seconds, **limits, **options)))
        except TimeoutException:
            found.append(None)
        except Exception:  # sympy raises many classes for expressions that it cannot compare
            found.append(0.0)
    return found
