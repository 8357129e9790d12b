"""Training and test examples of a run."""

from __future__ import annotations

import copy
import hashlib
import itertools
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from grpo_fast.data import FILES, TRACES, Example, load_splits
from grpo_fast.data.example import words_of
from grpo_fast.data.files import Survey, read_splits
from grpo_fast.data.generated import SortTask
from grpo_fast.data.prompts import in_chat
from grpo_fast.data.tokenizer import has_chat_template, token_counter

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

GENERATED_SAMPLE = 256  # number of examples of the sorting task that a fingerprint includes


class Splits:
    """The training and test examples of a data set.

    Args:
        data: the section `data` of a configuration. See `load_splits`.
        seed: seed of the training split's order.
        tokenizer: the tokenizer that counts the tokens of worked examples (`data.shots_tokens`).
            With None, the prompts contain no worked examples.
        test_only: see `read_splits`.
        found: the data that was already read from files. None reads it.
    """

    def __init__(
        self,
        data: Any,
        seed: int,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        test_only: bool = False,
        found: Survey | None = None,
    ) -> None:
        self.data = data
        self.seed = seed
        if found is None and data.task in FILES:
            found = read_splits(data, test_only)
        self.found = None if data.shots_tokens is None else found  # only `with_shots` needs it
        if tokenizer is None:
            data = data.model_copy(update={"shots_tokens": None})
        self.train, self.test = load_splits(data, seed, token_counter(tokenizer), found)

    def for_tokenizer(self, tokenizer: PreTrainedTokenizerBase) -> Splits:
        """Return the splits with prompts in the format of this tokenizer's model.

        If `data.chat` is None and the tokenizer has a chat template, questions from a file become
        chat messages.
        """
        splits = copy.copy(self)
        splits.data = self.data.model_copy(update={"chat": asks_in_chat(self.data, tokenizer)})
        if splits.data.chat and not self.data.chat:
            splits.train = [in_chat(example) for example in self.train]
            splits.test = [in_chat(example) for example in self.test]
        return splits

    def with_shots(self, tokenizer: PreTrainedTokenizerBase) -> Splits:
        """Return the splits with worked examples before each question if `shots_tokens` is set."""
        if self.data.shots_tokens is None:
            return self
        return Splits(self.data, self.seed, tokenizer, found=self.found)

    @property
    def listed(self) -> Sequence[Example]:
        """Return the training examples to check before a run.

        These are all examples of a file, or one example of the sorting task. The list is empty for
        recorded rollouts, whose examples contain task names instead of prompts.
        """
        if self.data.task == TRACES:
            return []
        return self.train if isinstance(self.train, list) else self.train[:1]

    def symbols(self) -> list[str]:
        """Return all different words of the examples, as input of `build_symbol_tokenizer`."""
        if isinstance(self.train, SortTask):
            return list(self.train.vocabulary)
        examples = itertools.chain(self.train, self.test)
        return sorted({word for example in examples for word in words_of(example)})

    def fingerprints(self) -> dict[str, str]:
        """Return a hash of each split's examples, under the keys `data.train` and `data.test`."""
        return {"data.train": _fingerprint(self.train), "data.test": _fingerprint(self.test)}


def asks_in_chat(data: Any, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether questions are turned into chat messages.

    The setting `data.chat` decides this. If `data.chat` is None, the result is True for questions
    from a file if the tokenizer has a chat template.
    """
    if data.chat is None:
        return data.task in FILES and has_chat_template(tokenizer)
    return bool(data.chat)


def _fingerprint(examples: Sequence[Example]) -> str:
    count = len(examples) if isinstance(examples, list) else GENERATED_SAMPLE
    digest = hashlib.sha256()
    for one in itertools.islice(examples, count):
        row: list[object] = [one.prompt, one.answer, one.solution, dict(one.fields)]
        digest.update(json.dumps(row, sort_keys=True, default=str).encode() + b"\n")
    return f"{len(examples)} examples, sha256 {digest.hexdigest()[:16]}"
