"""Examples from a file, a folder or a hub dataset, in the format of GSM8K or a general format."""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from grpo_fast.data.example import Example
from grpo_fast.data.prompts import Form, ShotPrompts
from grpo_fast.data.readers import TEST_SPLITS, Rows, hub_splits, is_local, local_splits, read_file
from grpo_fast.data.records import parse_record
from grpo_fast.errors import require

log = logging.getLogger(__name__)

SPLIT_SEED = "grpo_fast held-out lines"


class Survey(NamedTuple):
    """Both splits of a data source, and warnings about the data that the caller must log."""

    train: list[Example]
    test: list[Example]
    notes: list[str]


def read_splits(data: Any, test_only: bool = False) -> Survey:
    """Read both splits of a data source, log its warnings, and check that it has examples.

    Args:
        data: the section `data` of a configuration.
        test_only: True skips the training split if neither the test split nor `data.shots_tokens`
            needs it. The training split is then empty.
    """
    needs_train = not test_only or data.shots_tokens is not None  # shots are training examples
    found = survey(data, needs_train)
    for note in found.notes:
        log.warning("data: %s", note)
    require(found.test, "data", f"at least one test example in {data.path}", "none")
    fits = found.train or not needs_train
    require(fits, "data", f"at least one training example in {data.path}", "none")
    return found


def file_splits(
    found: Survey, data: Any, seed: int, tokenizer: Any
) -> tuple[Sequence[Example], Sequence[Example]]:
    """Return both splits of a file, folder or hub dataset with prompts. See `splits.Splits`."""
    form = Form.of(data)
    test = found.test[: data.n_test]
    ordered = list(found.train)
    random.Random(f"{seed}/order").shuffle(ordered)
    if data.shots_tokens is None:
        return [form.apply(e) for e in ordered], [form.apply(e) for e in test]
    pool = [e for e in found.train if isinstance(e.prompt, str)]
    options = {"budget": data.shots_tokens, "tokenizer": tokenizer}
    shown = ShotPrompts(ordered, pool, form, seed=seed, **options)
    # Do not use the run's seed for the worked examples of test prompts. They must be the same in
    # all runs, so that evaluations can be compared.
    return shown, ShotPrompts(test, pool, form, seed="test", **options)


def read_examples(data: Any) -> list[Example]:
    """Read the file `data.path`, and return an example with a formatted prompt for each row.

    Args:
        data: the section `data` of a configuration.
    """
    form = Form.of(data)
    return [form.apply(example) for example in _parsed(read_file(Path(data.path)), data)]


def survey(data: Any, needs_train: bool = True) -> Survey:
    """Read both splits of a data source, without applying the prompt template.

    If the source has no test split, some rows of the training split become the test split. The
    choice of rows does not depend on the run's seed.

    Args:
        data: the section `data` of a configuration.
        needs_train: if False, skip the training split, unless the source has no test split.
    """
    # 1. Read the splits. If there is no test split, hold out some training rows for it.
    local = is_local(data.path)
    splits = local_splits(Path(data.path)) if local else hub_splits(data.path)
    train_name = "train" if "train" in splits else next(iter(splits))
    test_name = next((n for n in TEST_SPLITS if n in splits and n != train_name), None)
    train = _parsed(splits[train_name](), data) if needs_train or test_name is None else []
    if test_name is None:
        train, test = _hold_out(train, data.n_test, data.path)
    else:
        test = _parsed(splits[test_name](), data)
    # 2. Remove test prompts from the training split, unless the split would become empty.
    notes = []
    known = {repr(e.prompt) for e in test}
    different = [e for e in train if repr(e.prompt) not in known]
    if train and not different:
        notes.append("every training prompt is also a test prompt, so nothing is held out")
    elif len(different) < len(train):
        skipped = len(train) - len(different)
        notes.append(f"{skipped} training rows are skipped, because their prompts are test prompts")
    return Survey(different or train, test, notes)


def _parsed(rows: Rows, data: Any) -> list[Example]:
    return [parse_record(place, row, data.task == "gsm8k", data.columns) for place, row in rows]


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
