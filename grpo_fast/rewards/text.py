"""Rewards of a text by itself: they read no answer."""

from __future__ import annotations

from collections.abc import Sequence


def distinct_words(*, completions: Sequence[str]) -> list[float]:
    """Different words / words, case aside; 0 without any. Repetition is what costs."""
    words = [text.casefold().split() for text in completions]
    return [len(set(found)) / max(len(found), 1) for found in words]
