"""Training and test examples of a run, from files, the hub or a generated task."""

from __future__ import annotations

import copy
import hashlib
import itertools
import json
import logging
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_fast.data import FILES, Example, text_of
from grpo_fast.data.generated import SortTask, open_examples
from grpo_fast.data.prompts import Form, ShotPrompts, check_rendered, in_chat
from grpo_fast.data.readers import (
    GYM,
    TEST_SPLITS,
    Rows,
    gym_splits,
    hub_splits,
    is_local,
    local_splits,
    read_file,
)
from grpo_fast.data.records import TESTS, EmptyField, column_of, find, parse_record
from grpo_fast.data.tokenizer import has_chat_template
from grpo_fast.errors import require

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

GENERATED_SAMPLE = 256  # number of examples of the sorting task that a fingerprint includes
SPLIT_SEED = "grpo_fast held-out lines"
Usable = Callable[[list[Example]], Sequence[Example]]


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
        usable: function that receives the examples of a file and returns the usable ones. It may
            raise a ValueError.

    Attributes:
        train: training examples with prompts, in the order of training.
        test: test examples with prompts.
        questions: training and test examples of a file before the template, in the file's order.

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
        usable: Usable = list,
    ) -> None:
        self.data = data
        self.seed = seed
        if data.task == "sort":
            options = {"seed": seed, "n_test": data.n_test}
            self.train = SortTask(data.digits, split="train", **options)
            self.test = SortTask(data.digits, split="test", **options)
        elif data.task == "open":
            self.train = self.test = open_examples()
        else:
            self.questions = read_questions(data, test_only, usable)
            self._build_prompts(tokenizer)

    def _build_prompts(self, tokenizer: Callable[..., Any] | None) -> None:
        """Apply the template and the chat settings, and with a tokenizer add worked examples."""
        form = Form.of(self.data)
        train, test = self.questions
        test = test[: self.data.n_test]
        ordered = list(train)
        random.Random(f"{self.seed}/order").shuffle(ordered)
        if self.data.shots_tokens is None or tokenizer is None:
            self.train = [form.apply(example) for example in ordered]
            self.test = [form.apply(example) for example in test]
            return
        pool = [e for e in train if isinstance(e.prompt, str)]
        options = {"budget": self.data.shots_tokens, "tokenizer": tokenizer}
        self.train = ShotPrompts(ordered, pool, form, seed=self.seed, **options)
        # Do not use the run's seed for the worked examples of test prompts. They must be the same
        # in all runs, so that evaluations can be compared.
        self.test = ShotPrompts(test, pool, form, seed="test", **options)

    def for_tokenizer(
        self,
        tokenizer: PreTrainedTokenizerBase,
        encode: Callable[..., list[list[int]]] | None = None,
    ) -> Splits:
        """Return the splits with prompts in the format of this tokenizer's model.

        If `data.chat` is None and the tokenizer has a chat template, questions from a file become
        chat messages. Prompts of more than `data.max_prompt_tokens` tokens are skipped.

        Args:
            tokenizer: the tokenizer of the model.
            encode: `rollout.encode_prompts`. None skips no prompt.

        Raises:
            ValueError: a prompt was rendered for a different model, or no prompt is short enough.
        """
        splits = copy.copy(self)
        splits.data = self.data.model_copy(update={"chat": asks_in_chat(self.data, tokenizer)})
        if self.data.task not in FILES:
            return splits
        splits._build_prompts(None)
        check_rendered([*splits.train, *splits.test], tokenizer)
        if self.data.max_prompt_tokens is not None and encode is not None:
            splits.train = without_long(splits.train, splits.data, tokenizer, encode, "train")
            splits.test = without_long(splits.test, splits.data, tokenizer, encode, "test")
        return splits

    def with_shots(self, tokenizer: PreTrainedTokenizerBase) -> Splits:
        """Return the splits with worked examples before each question if `shots_tokens` is set."""
        if self.data.shots_tokens is None:
            return self
        splits = copy.copy(self)
        splits._build_prompts(tokenizer)
        return splits

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


def without_long(
    examples: Sequence[Example],
    data: Any,
    tokenizer: PreTrainedTokenizerBase,
    encode: Callable[..., list[list[int]]],
    split: str,
) -> list[Example]:
    """Return the examples without prompts of more than `data.max_prompt_tokens` tokens.

    Args:
        examples: the examples of a split.
        data: the section `data` of a configuration. If `chat` is true, text prompts are counted as
            chat messages.
        tokenizer: the tokenizer that counts the tokens.
        encode: `rollout.encode_prompts`, which returns the token ids of each prompt.
        split: name of the split, for messages.

    Raises:
        ValueError: no prompt is short enough.
    """
    most = data.max_prompt_tokens
    prompts = [(in_chat(e) if data.chat else e).prompt for e in examples]
    ids = encode(tokenizer, prompts, data.template_kwargs)
    kept = [e for e, tokens in zip(examples, ids, strict=True) if len(tokens) <= most]
    came = f"{most}, which none of {len(examples)} {split} prompts is within"
    require(kept or not examples, "data.max_prompt_tokens", "a larger number", came)
    if len(kept) < len(examples):
        skipped = len(examples) - len(kept)
        log.warning("data: %d %s prompts have more tokens, and are skipped", skipped, split)
    return kept


def read_questions(
    data: Any, test_only: bool, usable: Usable = list
) -> tuple[list[Example], list[Example]]:
    """Read both splits of a data source, without applying the prompt template.

    If the source has no test split, some rows of the training split become the test split. The
    choice of rows does not depend on the run's seed.

    Args:
        data: the section `data` of a configuration.
        test_only: if True, skip the training split if neither the test split nor
            `data.shots_tokens` needs it. The training split is then empty.
        usable: function that receives examples and returns the usable ones.
    """
    # 1. Read the splits. A column `split` divides the rows of a single split. Without a test split,
    # hold out some training rows for it.
    if data.path.startswith(GYM):
        splits = gym_splits(data.path, data.options, data.n_test)
    elif is_local(data.path):
        splits = local_splits(Path(data.path), data.encoding)
    else:
        splits = hub_splits(data.path)
    train_name = "train" if "train" in splits else next(iter(splits))
    test_name = next((n for n in TEST_SPLITS if n in splits and n != train_name), None)
    needs_train = not test_only or test_name is None or data.shots_tokens is not None
    rows = splits[train_name]() if needs_train else []
    rows, test_rows = (rows, splits[test_name]()) if test_name is not None else _by_column(rows)
    train = _parsed(rows, data)
    test = _parsed(test_rows, data)
    if test_name is None and not test_rows:
        train, test = _hold_out(train, data.n_test, data.path)
    # Hold out rows before unusable rows are removed. The held-out rows then do not depend on the
    # rewards, so `grpo-fast eval` finds the same rows.
    train = list(usable(train))
    test = list(usable(test))
    require(test, "data", f"at least one test example in {data.path}", "none")
    fits = train or not needs_train
    require(fits, "data", f"at least one training example in {data.path}", "none")
    # 2. Remove test prompts from the training split, unless the split would become empty.
    known = {repr(e.prompt) for e in test}
    different = [e for e in train if repr(e.prompt) not in known]
    if train and not different:
        log.warning("data: every training prompt is also a test prompt, so nothing is held out")
    elif len(different) < len(train):
        skipped = len(train) - len(different)
        log.warning(
            "data: %d training rows are skipped, because their prompts are test prompts", skipped
        )
    return different or train, test


def read_examples(data: Any) -> list[Example]:
    """Read the file `data.path`, and return an example with a formatted prompt for each row.

    Args:
        data: the section `data` of a configuration.
    """
    form = Form.of(data)
    rows = read_file(Path(data.path), data.encoding)
    return [form.apply(example) for example in _parsed(rows, data)]


def asks_in_chat(data: Any, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether questions are turned into chat messages.

    The setting `data.chat` decides this. If it is None, return True only if the questions come from
    a file and the tokenizer has a chat template.
    """
    if data.chat is None:
        return data.task in FILES and has_chat_template(tokenizer)
    return bool(data.chat)


def _parsed(rows: Rows, data: Any) -> list[Example]:
    """Return an example for each row. Log how many rows are skipped or have no plain answer."""
    examples: list[Example] = []
    is_gsm8k = data.task == "gsm8k"
    for place, row in rows:
        try:
            example = parse_record(place, row, is_gsm8k, data.columns, data.prompt_template)
        except EmptyField as error:
            if not data.drop_unusable:
                raise EmptyField(f"{error}; data.drop_unusable=true skips such rows") from None
            continue
        if not (data.drop_unusable and _has_no_answer(example)):
            examples.append(example)
    skipped = len(rows) - len(examples)
    without = sum(map(_has_no_answer, examples))
    nested = sum(e.answer is None and e.label is not None for e in examples)
    if skipped:
        log.warning("data: %d rows without a prompt or an answer are skipped", skipped)
    if 0 < without < len(examples):
        log.warning("data: %d rows have no answer; data.drop_unusable=true skips them", without)
    if nested:
        key = "data.columns={answer: COLUMN.KEY} reads a part"
        log.warning("data: %d answers are lists or mappings, for your own reward; %s", nested, key)
    return examples


def _has_no_answer(example: Example) -> bool:
    fields = example.fields
    return example.label is None and find(fields, TESTS) is None and "entry" not in fields


def _by_column(rows: Rows) -> tuple[Rows, Rows]:
    """Divide rows by their column `split` into training and test rows. Without it, all train."""
    named = [
        str(isinstance(r, dict) and column_of(r, ["split"]) or "train").lower() for _, r in rows
    ]
    test_name = next((name for name in TEST_SPLITS if name in named), None)
    unknown = sorted({*named} - {"train", *TEST_SPLITS})
    expected = f"train or one of {', '.join(TEST_SPLITS)}; rename the column if it is no split"
    require(not unknown, "data: column 'split'", expected, unknown[:3])
    if "train" not in named:
        return rows, []
    train = [row for row, name in zip(rows, named, strict=True) if name == "train"]
    return train, [row for row, name in zip(rows, named, strict=True) if name == test_name]


def _hold_out(
    examples: list[Example], n_test: int | None, source: object
) -> tuple[list[Example], list[Example]]:
    """Divide examples at random into training and test examples, and return both.

    The number of test examples is `n_test`. If `n_test` is None, it is a tenth of all examples.
    """
    count = max(1, len(examples) // 10) if n_test is None else n_test
    expected = f"at most the {len(examples)} lines of {source}"
    require(count <= len(examples), "data.n_test", expected, count)
    order = list(range(len(examples)))
    random.Random(SPLIT_SEED).shuffle(order)
    held_out = set(order[:count])
    test = [e for i, e in enumerate(examples) if i in held_out]
    train = [e for i, e in enumerate(examples) if i not in held_out]
    return train or examples, test


def _fingerprint(examples: Sequence[Example]) -> str:
    count = len(examples) if isinstance(examples, list) else GENERATED_SAMPLE
    digest = hashlib.sha256()
    for one in itertools.islice(examples, count):
        row: list[object] = [one.prompt, one.answer, one.solution, dict(one.fields)]
        digest.update(json.dumps(row, sort_keys=True, default=str).encode() + b"\n")
    return f"{len(examples)} examples, sha256 {digest.hexdigest()[:16]}"
