"""Which prompts a run has asked, and how hard it found each of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from grpo_fast.data import Example


class Asked(NamedTuple):
    """A training prompt and its place in the training set."""

    number: int
    example: Example


class PromptQueue:
    """The training set in its order, round and round. `consumed` alone says where it stands."""

    def __init__(self, examples: Sequence[Example], consumed: int = 0) -> None:
        self.examples, self.consumed = examples, consumed

    def take(self, count: int) -> list[Asked]:
        """The next `count` prompts."""
        places = range(self.consumed, self.consumed + count)
        self.consumed += count
        numbers = [place % len(self.examples) for place in places]
        return [Asked(number, self.examples[number]) for number in numbers]


def log_prompts(folder: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Append to the run's prompts.jsonl: one line for each prompt that a step has asked."""
    with (folder / "prompts.jsonl").open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(row, allow_nan=False) + "\n" for row in rows)
