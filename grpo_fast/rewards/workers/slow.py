"""Search with a regular expression of the user, which may take forever."""

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
