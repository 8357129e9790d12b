"""Both splits of a data set, read once for a whole run."""

from __future__ import annotations

import copy
import hashlib
import itertools
import json
from collections.abc import Sequence
from typing import Any

from grpo_fast.data import FILES, TRACES, Example, load_examples, task_symbols
from grpo_fast.data.prompts import in_chat
from grpo_fast.data.tokenizer import has_chat_template, token_counter

MADE = 256  # of examples that are made when asked for, so many stand for all


class Splits:
    """Training and held-out examples of a data config, a section as `load_examples` reads it.

    `shots_tokens` need a tokenizer: without one, questions have no worked examples in front.
    """

    def __init__(self, data: Any, seed: int, tokenizer: Any = None) -> None:
        self.data, self.seed = data, seed
        if tokenizer is None:
            data = data.model_copy(update={"shots_tokens": None})
        counted = token_counter(tokenizer)
        self.train, self.test = (
            load_examples(data, split=split, seed=seed, count_tokens=counted)
            for split in ("train", "test")
        )

    def asked_of(self, tokenizer: Any) -> Splits:
        """Return the splits in the form in which this tokenizer's model is asked.

        Questions of a file become chat messages if the tokenizer has a chat template, unless
        `data.chat` is set.
        """
        splits = copy.copy(self)
        splits.data = self.data.model_copy(update={"chat": asks_in_chat(self.data, tokenizer)})
        if splits.data.chat and not self.data.chat:
            splits.train = [in_chat(example) for example in self.train]
            splits.test = [in_chat(example) for example in self.test]
        return splits

    def with_shots(self, tokenizer: Any) -> Splits:
        """The splits with `shots_tokens` of worked examples in front of each question."""
        return self if self.data.shots_tokens is None else Splits(self.data, self.seed, tokenizer)

    @property
    def listed(self) -> Sequence[Example]:
        """The training examples to check before a run: all of a file, one of a generated task.

        Empty for recorded rollouts: their examples are names of tasks, which no policy completes.
        """
        if self.data.task == TRACES:
            return []
        return self.train if isinstance(self.train, list) else self.train[:1]

    def symbols(self) -> list[str]:
        return task_symbols(self.data, itertools.chain(self.train, self.test))

    def fingerprints(self) -> dict[str, str]:
        """A hash of the questions, answers and fields of each split: `data.train`, `data.test`."""
        return {"data.train": _fingerprint(self.train), "data.test": _fingerprint(self.test)}


def asks_in_chat(data: Any, tokenizer: Any) -> bool:
    """Return whether questions are sent as chat messages: `data.chat`, or by the tokenizer."""
    if data.chat is None:
        return data.task in FILES and has_chat_template(tokenizer)
    return bool(data.chat)


def _fingerprint(examples: Sequence[Example]) -> str:
    count = len(examples) if isinstance(examples, list) else MADE
    digest = hashlib.sha256()
    for one in itertools.islice(examples, count):
        row: list[Any] = [one.prompt, one.answer, one.solution, dict(one.fields)]
        digest.update(json.dumps(row, sort_keys=True, default=str).encode() + b"\n")
    return f"{len(examples)} examples, sha256 {digest.hexdigest()[:16]}"
