"""Training and test examples of a run, from files, the hub or a generated task.

The tasks that need no data files are sorting digits, and a list of open prompts.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import json
import logging
import random
import reprlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_fast.data import FILES, Example, LazySequence, text_of
from grpo_fast.data.prompts import Form, ShotPrompts, Shots
from grpo_fast.data.readers import Rows, read_file, read_source
from grpo_fast.data.records import TESTS, EmptyField, column_of, find, parse_record
from grpo_fast.data.tokenizer import has_chat_template
from grpo_fast.errors import require

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)


# ---------------------------------------------------------------------------------- Generated tasks
TRAINING_EXAMPLES = 1 << 16
USUAL_TEST = 256  # default number of test prompts, if at least twice as many prompts exist
HELD_OUT_SEED = "grpo_fast held-out prompts"


class SortTask(LazySequence):
    """One split of the sorting task from the CS336 lecture. `3 1 2 =` has the answer `1 2 3`.

    Training example i depends only on the seed and on i. The test prompts do not depend on the
    seed. They are excluded from training, unless the test split contains all possible prompts.

    Args:
        digits: number of digits in a prompt.
        split: "train" or "test".
        seed: seed of the training examples.
        n_test: number of test prompts. By default 256, or half of all prompts if that is less.

    Raises:
        ValueError: fewer than `n_test` different prompts exist.
    """

    vocabulary = (*map(str, range(10)), "=")  # all words of prompts and answers

    def __init__(self, digits: int, *, split: str, seed: int, n_test: int | None = None) -> None:
        self.digits = digits
        self.split = split
        self.seed = seed
        space = 10**digits
        n_test = min(USUAL_TEST, space // 2) if n_test is None else n_test
        longer = f"{n_test}; make the prompts longer or the test split smaller"
        most = f"at most the {space} different prompts of this task"
        require(n_test <= space, "data.n_test", most, longer)
        rng = random.Random(HELD_OUT_SEED)
        chosen = dict[tuple[int, ...], None]()
        while len(chosen) < n_test:
            chosen[self.draw(rng)] = None
        self.test_prompts = list(chosen)
        self._not_trained = frozenset(self.test_prompts if n_test < space else ())
        self.length = n_test if split == "test" else TRAINING_EXAMPLES

    def draw(self, rng: random.Random) -> tuple[int, ...]:
        return tuple(rng.randrange(10) for _ in range(self.digits))

    def make(self, index: int) -> Example:
        if self.split == "test":
            content = self.test_prompts[index]
        else:
            # Seed the generator with a string. Python hashes a string seed with SHA-512, so all
            # processes draw the same numbers.
            rng = random.Random(f"{self.seed}/{index}")
            content = self.draw(rng)
            while content in self._not_trained:
                content = self.draw(rng)
        answer = " ".join(map(str, sorted(content)))
        return Example(prompt=" ".join([*map(str, content), "="]), answer=answer, solution=answer)


# Prompts of the task `open`, which have no answers.
OPEN = (
    "The weather today is",
    "Once upon a time",
    "My favourite book is about",
    "In the morning, the city",
    "The most important thing to learn is",
    "She opened the door and",
    "Scientists have found that",
    "When the music stopped,",
)


# ------------------------------------------------------------------------------------------- Splits
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
        usable: function that receives the examples of a file and returns the usable ones. It may
            raise a ValueError.
        whole: if True, all rows of the file `data.path` are test examples, and `data.n_test` is
            ignored.

    Attributes:
        train: training examples with prompts, in the order of training.
        test: test examples with prompts.
        questions: training and test examples of a file before the template, in the file's order.

    Raises:
        ValueError: a file or package is missing, or a row is bad (`file:line: reason`).
    """

    train: Sequence[Example]
    test: Sequence[Example]

    def __init__(self, data: Any, seed: int, *, usable: Usable = list, whole: bool = False) -> None:
        self.data = data
        self.seed = seed
        if data.task == "sort":
            options = {"seed": seed, "n_test": data.n_test}
            self.train = SortTask(data.digits, split="train", **options)
            self.test = SortTask(data.digits, split="test", **options)
        elif data.task == "open":
            self.train = self.test = [Example(prompt, None, None) for prompt in OPEN]
        else:
            self.questions = (read_all if whole else read_questions)(data, usable)
            self._build_prompts(None)

    def _build_prompts(self, tokenizer: PreTrainedTokenizerBase | None) -> None:
        """Apply the template and the chat settings, and with a tokenizer add worked examples."""
        form = Form.of(self.data)
        train, test = self.questions
        ordered = list(train)
        random.Random(f"{self.seed}/order").shuffle(ordered)
        if self.data.shots_tokens is None or tokenizer is None or not train:
            self.train = [form.apply(example) for example in ordered]
            self.test = [form.apply(example) for example in test]
            return
        pool = [e for e in train if isinstance(e.prompt, str)]
        shots = Shots(pool, form, self.data.shots_tokens, tokenizer)
        self.train = ShotPrompts(ordered, shots, self.seed)
        # Do not use the run's seed for the worked examples of test prompts. They must be the same
        # in all runs, so that evaluations can be compared.
        self.test = ShotPrompts(test, shots, "test")

    def for_tokenizer(self, tokenizer: PreTrainedTokenizerBase, with_shots: bool = True) -> Splits:
        """Return the splits with prompts in the format of this tokenizer's model.

        If `data.chat` is None and the tokenizer has a chat template, questions from a file become
        chat messages.

        Args:
            tokenizer: the tokenizer, which also counts the tokens of worked examples.
            with_shots: put worked examples before each question if `data.shots_tokens` is set.
        """
        chat = self.data.chat
        if chat is None:
            chat = self.data.task in FILES and has_chat_template(tokenizer)
        splits = copy.copy(self)
        splits.data = self.data.model_copy(update={"chat": chat})
        if self.data.task in FILES:
            splits._build_prompts(tokenizer if with_shots else None)
        return splits

    @property
    def listed(self) -> Sequence[Example]:
        """Return the training examples to check before a run.

        These are all examples, or only the first if the examples are built on demand.
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


def read_questions(data: Any, usable: Usable = list) -> tuple[list[Example], list[Example]]:
    """Read both splits of a data source, without applying the prompt template.

    If the source has no test split, some rows of the training split become the test split. The
    choice of rows does not depend on the run's seed.

    Args:
        data: the section `data` of a configuration.
        usable: function that receives examples and returns the usable ones.
    """
    # 1. Read the splits. Without a test split, hold out some training rows for it.
    train_rows, test_rows = read_source(data)
    train = _parsed(train_rows, data)
    if test_rows is not None:
        test = _parsed(test_rows, data)
    else:
        named = {str(column_of(row, ["split"])).lower() for _, row in train_rows}
        expected = "a file for each split, such as train.jsonl and test.jsonl"
        is_single = named <= {"none", "train"}
        require(is_single, "data: column 'split'", expected, reprlib.repr(sorted(named)))
        train, test = _hold_out(train, data)
    # Hold out rows before unusable rows are removed. The held-out rows then do not depend on the
    # rewards, so `grpo-fast eval` finds the same rows.
    train = list(usable(train))
    test = list(usable(test))
    for name, examples in (("test", test), ("training", train)):
        require(examples, "data", f"at least one {name} example in {data.path}", "none")
    # 2. Remove test prompts from the training split, unless the split would become empty.
    known = {repr(e.prompt) for e in test}
    different = [e for e in train if repr(e.prompt) not in known]
    if not different:
        log.warning("data: every training prompt is also a test prompt, so nothing is held out")
    elif len(different) < len(train):
        text = "data: %d training rows are skipped, as their prompts are in the test split"
        log.warning(text, len(train) - len(different))
    return different or train, test[: data.n_test]


def read_all(data: Any, usable: Usable = list) -> tuple[list[Example], list[Example]]:
    """Return no training examples, and all rows of the file `data.path` as test examples."""
    test = list(usable(_parsed(list(read_file(Path(data.path))), data)))
    require(test, "data", f"at least one test example in {data.path}", "none")
    return [], test


def _parsed(rows: Rows, data: Any) -> list[Example]:
    """Return an example for each row. Log how many rows are skipped or have no answer."""
    examples: list[Example] = []
    without: list[str] = []  # locations of the rows without an answer
    for place, row in rows:
        try:
            example = parse_record(place, row, data)
        except EmptyField:
            if not data.drop_unusable:
                raise
            continue
        if _has_no_answer(example):
            without.append(place)
            if data.drop_unusable:
                continue
        examples.append(example)
    if len(examples) < len(rows):
        skipped = len(rows) - len(examples)
        log.warning("data: %d rows without a prompt or an answer are skipped", skipped)
    elif 0 < len(without) < len(rows):
        text = "data: %d rows have no answer, first %s; data.drop_unusable=true skips them"
        log.warning(text, len(without), without[0])
    return examples


def _has_no_answer(example: Example) -> bool:
    fields = example.fields
    return example.label is None and find(fields, TESTS) is None and "entry" not in fields


def _hold_out(examples: list[Example], data: Any) -> tuple[list[Example], list[Example]]:
    """Divide examples at random into training and test examples, and return both.

    The number of test examples is `data.n_test`, by default a tenth of all examples.
    """
    count = data.n_test or max(1, len(examples) // 10)
    expected = f"at most the {len(examples)} lines of {data.path}"
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
    for one in examples[:count]:
        row = [one.prompt, one.answer, one.solution, dict(one.fields)]
        digest.update(json.dumps(row, sort_keys=True, default=str).encode() + b"\n")
    return f"{len(examples)} examples, sha256 {digest.hexdigest()[:16]}"
