"""Search with a regular expression of the user, which may take forever."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Sequence
from typing import Any

SECONDS = 1.0  # time limit for one completion


def format_pattern(*, completions: Sequence[str], pattern: str, whole: bool = False) -> list[Any]:
    """Return 1 where the completion contains the pattern, else 0.

    A completion in which the search takes longer than a second has no reward. Its entry in the
    result is the TimeoutError.

    Args:
        completions: N completions.
        pattern: regular expression, in which a dot also matches a line end.
        whole: if True, the pattern must match the full completion.
    """
    compiled = re.compile(pattern, re.DOTALL)
    signal.signal(signal.SIGALRM, _stop)  # the search looks for signals while it runs
    find = compiled.fullmatch if whole else compiled.search
    return [_found(find, text) for text in completions]


def _found(find: Callable[[str], Any], text: str) -> float | TimeoutError:
    try:
        try:
            signal.setitimer(signal.ITIMER_REAL, SECONDS)
            return float(find(text) is not None)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except TimeoutError as error:  # the timer may also end in `finally`
        return error


def _stop(*_: object) -> None:
    raise TimeoutError(f"the search took longer than {SECONDS:g} s")
