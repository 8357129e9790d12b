"""GSM8K's gold texts: `… <<48/2=24>>24 clips …` and, on the last line, `#### 72`."""

from __future__ import annotations

import re

_CALCULATOR = re.compile(r"<<[^<>\n]*>>")
_GOLD = re.compile(r"-?[0-9][0-9,]*(?:\.[0-9]+)?")


def gold_answer(solution: str) -> str:
    """The number after the last `#### `, without thousands commas: '… #### 1,080' → '1080'.

    Raises:
        ValueError: no `#### `, or no plain number behind it.
    """
    _, marker, tail = solution.rpartition("####")
    if not marker:
        raise ValueError(f"expected '#### <number>' at the end of the answer, got {solution[-60:]!r}")
    text = tail.strip()
    if not _GOLD.fullmatch(text):
        raise ValueError(f"expected a number after '####', got {text[:60]!r}")
    return text.replace(",", "")


def strip_calculator(solution: str) -> str:
    """The solution without GSM8K's `<<48/2=24>>` calculator notes."""
    return _CALCULATOR.sub("", solution).strip()
