"""Format by a regular expression, which may take forever: this file is run in a worker."""

from __future__ import annotations

import re
from collections.abc import Sequence


def format_pattern(*, completions: Sequence[str], pattern: str, whole: bool = False) -> list[float]:
    """1 where the pattern is found (`whole`: is all of the text). A dot is a line end, too."""
    compiled = re.compile(pattern, re.DOTALL)
    find = compiled.fullmatch if whole else compiled.search
    return [float(find(text) is not None) for text in completions]


format_pattern.per_sample = True  # type: ignore[attr-defined]
