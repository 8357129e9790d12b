"""Comparison of mathematical expressions with math-verify, in a worker process.

math-verify implements its time limits with signals, which only the main thread of a process
receives.
"""

from __future__ import annotations

from collections.abc import Sequence

from math_verify import parse, verify
from math_verify.errors import TimeoutException


def same_expressions(
    *, completions: Sequence[str], answers: Sequence[str], seconds: int
) -> list[float | None]:
    """Return 1 where two LaTeX expressions are equal, else 0, or None if it takes too long.

    Args:
        completions: N expressions.
        answers: N gold expressions.
        seconds: time limit for one comparison.
    """
    found: list[float | None] = []
    for pair in zip(completions, answers, strict=True):
        try:
            said, gold = [
                parse(f"${x}$", parsing_timeout=seconds, raise_on_error=True) for x in pair
            ]
            found.append(float(verify(gold, said, timeout_seconds=seconds, raise_on_error=True)))
        except TimeoutException:
            found.append(None)
        except Exception:  # sympy raises many classes for expressions that it cannot compare
            found.append(0.0)
    return found


# Compare once now, with a long time limit. The first comparison imports sympy, which on a busy
# machine may take longer than the limit of a normal comparison.
same_expressions(completions=["x"], answers=["x"], seconds=60)
