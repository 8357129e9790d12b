"""Which prompts a run asks, one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from grpo_fast.data import Example


class Asked(NamedTuple):
    """A training prompt and its place in the training set."""

    number: int
    example: Example


class PromptQueue:
    """The training set in its order, round and round. `consumed` alone says where it stands."""

    def __init__(self, examples: Sequence[Example], consumed: int = 0) -> None:
        self.examples, self.consumed = examples, consumed

    def next(self, count: int) -> list[Asked]:
        """The `count` prompts that `take` would give."""
        places = range(self.consumed, self.consumed + count)
        numbers = [place % len(self.examples) for place in places]
        return [Asked(number, self.examples[number]) for number in numbers]

    def take(self, count: int) -> list[Asked]:
        asked = self.next(count)
        self.consumed += count
        return asked
