"""Training and test examples of a run."""

from __future__ import annotations

import copy
import hashlib
import itertools
import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from grpo_fast.data import FILES, Example
from grpo_fast.data.example import text_of
from grpo_fast.data.files import Survey, file_splits, read_splits
from grpo_fast.data.generated import SortTask, open_examples
from grpo_fast.data.prompts import in_chat
from grpo_fast.data.tokenizer import has_chat_template

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

GENERATED_SAMPLE = 256  # number of examples of the sorting task that a fingerprint includes


class Splits:
    """The training and test examples of a data set.

    If a prompt is in both splits, it is removed from the training split, unless the training split
    would then be empty. The task `open` has the same examples in both splits.

    Args:
        data: the section `data` of a configuration.
        seed: seed of the training split's order. The test split does not depend on the seed, so
            that runs can be compared.
        tokenizer: the tokenizer that counts the tokens of worked examples (`data.shots_tokens`).
            With None, the prompts contain no worked examples.
        test_only: if True, skip reading a file's training split, unless the test split or the
            worked examples are taken from it. The training split is then empty.
        found: the data that was already read from files. None reads it.

    Raises:
        ValueError: a file or package is missing, or a row is bad (`file:line: reason`).
    """

    train: Sequence[Example]
    test: Sequence[Example]

    def __init__(
        self,
        data: Any,
        seed: int,
        tokenizer: Callable[..., Any] | None = None,
        *,
        test_only: bool = False,
        found: Survey | None = None,
    ) -> None:
        self.data = data
        self.seed = seed
        self.found: Survey | None = None
        if data.task == "sort":
            options = {"seed": seed, "n_test": data.n_test}
            self.train = SortTask(data.digits, split="train", **options)
            self.test = SortTask(data.digits, split="test", **options)
        elif data.task == "open":
            self.train = self.test = open_examples()
        else:
            found = found or read_splits(data, test_only)
            if data.shots_tokens is not None:
                self.found = found  # only `with_shots` needs it
            if tokenizer is None:
                data = data.model_copy(update={"shots_tokens": None})
            self.train, self.test = file_splits(found, data, seed, tokenizer)

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

        For a data file, these are all its examples; for the sorting task, a single one.
        """
        return self.train if isinstance(self.train, list) else self.train[:1]

    def symbols(self) -> list[str]:
        """Return all distinct words of the examples, as input for `build_symbol_tokenizer`."""
        if isinstance(self.train, SortTask):
            return list(self.train.vocabulary)
        words: set[str] = set()
        for example in itertools.chain(self.train, self.test):
            for text in (text_of(example.prompt), example.answer, example.solution):
                words.update((text or "").split())
        return sorted(words)

    def fingerprints(self) -> dict[str, str]:
        """Return a hash of each split's examples, under the keys `data.train` and `data.test`."""
        return {"data.train": _fingerprint(self.train), "data.test": _fingerprint(self.test)}


def asks_in_chat(data: Any, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether questions are turned into chat messages.

    The setting `data.chat` decides this. If it is None, return True only if the questions come from
    a file and the tokenizer has a chat template.
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
