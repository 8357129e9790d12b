"""Pairs of a better and a worse answer to one prompt, to train a reward model."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any, NamedTuple

from grpo_fast.data.example import Example, Made, Prompt, need

CUT = 0.25  # of the spoiled answers lack their end, the others have wrong symbols in them


class Pair(NamedTuple):
    prompt: Prompt
    chosen: str
    rejected: str
    margin: float = 0.0  # by how much the first should score higher


class SpoiledPairs(Made[Pair]):
    """For each example two copies of its answer: one with few wrong places or none, one with more.

    Pair i depends on the seed and on i alone.
    """

    def __init__(self, examples: Sequence[Example], symbols: Sequence[str], seed: int | str):
        self.examples, self.symbols, self.seed = examples, symbols, seed
        self.length = len(examples)

    def make(self, index: int) -> Pair:
        rng, example = random.Random(f"{self.seed}/pairs/{index}"), self.examples[index]
        answer = str(example.answer).split()
        worse = rng.randint(1, len(answer))
        better = rng.randrange(worse)
        chosen, rejected = (_with_wrong(answer, n, self.symbols, rng) for n in (better, worse))
        return Pair(example.prompt, chosen, rejected)


def pairs_of(
    examples: Sequence[Example], symbols: Sequence[str] | None, *, seed: int | str
) -> Sequence[Pair]:
    """The pairs that lie in the examples' fields, or are made of their answers.

    Args:
        symbols: of a generated task, whose answers are spoiled with them; None: a file's examples.

    Raises DatasetError for a file's example without the two texts, or with a margin that is none.
    """
    if symbols is None:
        return [_stored(example) for example in examples]
    return SpoiledPairs(examples, symbols, seed)


def _with_wrong(answer: list[str], wrong: int, symbols: Sequence[str], rng: random.Random) -> str:
    if rng.random() < CUT:
        return " ".join(answer[: len(answer) - wrong])
    places = set(rng.sample(range(len(answer)), wrong))
    others = [rng.choice([s for s in symbols if s != right]) for right in answer]
    mixed = (others[i] if i in places else right for i, right in enumerate(answer))
    return " ".join(mixed)


def _stored(example: Example) -> Pair:
    where = f"data: the pair of prompt {str(example.prompt)[:60]!r}"
    texts: dict[str, Any] = {name: example.fields.get(name) for name in ("chosen", "rejected")}
    for name, text in texts.items():
        need(isinstance(text, str), where, f"a text in field {name!r}", repr(text))
    margin = example.fields.get("margin", 0.0)
    is_number = isinstance(margin, (int, float)) and not isinstance(margin, bool)
    fits = is_number and math.isfinite(margin)
    need(fits, where, "a finite number in field 'margin'", repr(margin))
    return Pair(example.prompt, texts["chosen"], texts["rejected"], float(margin))
