"""Rewards for the form of a completion: its length, its tags, its words."""

from __future__ import annotations

from collections.abc import Sequence

from grpo_fast.errors import require
from grpo_fast.rewards.extract import extract_strict

TAGS = ("<think>", "</think>", "<answer>", "</answer>")


def length_penalty(*, completion_lengths: Sequence[int], scale: float) -> list[float]:
    """−length / scale, in tokens: a completion of `scale` of them loses 1."""
    require(scale > 0, "scale", "a number above 0", scale)
    return [-length / scale for length in completion_lengths]


def overlong(*, completion_lengths: Sequence[int], max_length: int, buffer: int) -> list[float]:
    """DAPO's soft overlong punishment (2503.14476, eq. 13), 0 … −1.

    0 up to `max_length` − `buffer` tokens, from there falling linearly to −1 at `max_length`.
    """
    expected = f"a number above 0, at most max_length = {max_length}"
    require(0 < buffer <= max_length, "buffer", expected, buffer)
    free = max_length - buffer
    return [-min(max(length - free, 0) / buffer, 1.0) for length in completion_lengths]


def format_tags(
    *, completions: Sequence[str], tags: Sequence[str] = TAGS, per_tag: float = 0.1,
    number: bool = False,
) -> list[float]:  # fmt: skip
    """`per_tag` for each tag that stands there exactly once, and once more for all in their order,
    or with `number` for a number as the answer.

    With the four tags of a thought and an answer that is 0 … 0.5.
    """
    return [per_tag * _tag_count(text, tags, number) for text in completions]


def distinct_words(*, completions: Sequence[str]) -> list[float]:
    """Different words / all words, case aside; 0 without a word. It punishes repetition."""
    words = [text.casefold().split() for text in completions]
    return [len(set(each)) / max(len(each), 1) for each in words]


def _tag_count(text: str, tags: Sequence[str], number: bool) -> int:
    places = [text.find(tag) for tag in tags if text.count(tag) == 1]
    if number:
        return len(places) + (extract_strict(text) is not None)
    return len(places) + (len(places) == len(tags) and places == sorted(places))
