"""Examples from a file, a folder or a hub dataset, in GSM8K's or a general format."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

from grpo_fast.data.answers import parse_number
from grpo_fast.data.example import DataSource, Example, need
from grpo_fast.data.prompts import Form, ShotPrompts
from grpo_fast.data.readers import TEST_SPLITS, Rows, hub_splits, is_local, local_splits, read_file
from grpo_fast.data.records import parse_record
from grpo_fast.errors import conflict

log = logging.getLogger(__name__)

SPLIT_SEED = "grpo_fast held-out lines"
SETTINGS = (
    "path", "prompt_template", "system_prompt", "chat", "shots_tokens", "n_train", "n_test",
    "columns",
)  # fmt: skip


class Survey(NamedTuple):
    """Both splits of a data source, and warnings about them that the caller logs."""

    train: list[Example]
    test: list[Example]
    notes: list[str]


def load_file_examples(
    data: DataSource, *, split: str, seed: int, count_tokens: Callable[[str], int] | None = None
) -> Sequence[Example]:
    """Return the examples of one split of a file, folder or hub dataset. See `load_examples`."""
    # 1. Read both splits, and check that there are enough examples.
    settings = _settings(data)
    form = _form(settings)
    needs_train = split == "train" or settings.shots_tokens is not None
    train, test, notes = survey(data, needs_train)
    for note in notes if split == "train" else ():
        log.warning("data: %s", note)
    need(test, "data", f"at least one test example in {settings.path}", "none")
    # 2. Select examples.
    if split == "test":
        chosen = test[: settings.n_test]
    else:
        chosen = train[: settings.n_train]
        expected = "a training example whose prompt is not a test prompt as well"
        need(chosen, "data", f"{expected} in {settings.path}", "none")
        random.Random(f"{seed}/order").shuffle(chosen)
    # 3. Write the prompts.
    if settings.shots_tokens is None:
        return [form.apply(e) for e in chosen]
    if count_tokens is None:
        why = "the examples are counted in tokens; pass a function"
        raise conflict("count_tokens=None", f"data.shots_tokens={settings.shots_tokens}", why)
    pool = [e for e in train if isinstance(e.prompt, str)]
    # Do not use the run's seed for the worked examples of test prompts. They must be the same in
    # all runs, so that evaluations can be compared.
    draws = seed if split == "train" else "test"
    return ShotPrompts(
        chosen, pool, form, budget=settings.shots_tokens, count_tokens=count_tokens, seed=draws
    )


def read_examples(path: str | Path, *, data: DataSource | None = None) -> list[Example]:
    """Read a file, and return an example with a formatted prompt for each row.

    Args:
        path: a file in a format of `readers.FORMATS`.
        data: a config with `task`, `columns`, `prompt_template`, `system_prompt` and `chat`.
    """
    settings = _settings(data)
    form = _form(settings)
    is_gsm8k = getattr(data, "task", None) == "gsm8k"
    rows = read_file(Path(path))
    return [form.apply(parse_record(*row, is_gsm8k, settings.columns)) for row in rows]


def survey(data: DataSource, needs_train: bool = True) -> Survey:
    """Read both splits of a data source, without applying the prompt template.

    If the source has no test split, some rows of the training split become the test split. The
    choice of rows does not depend on the run's seed.

    Args:
        data: a config with `task`, `path`, `columns` and `n_test`.
        needs_train: False skips reading the training split if the source has a test split.
    """
    # 1. Find the splits.
    settings = _settings(data)
    source = settings.path
    need(source, "data.path", "a file, a folder or a hub id", "none")
    local = isinstance(source, Path) or is_local(source)
    splits = local_splits(Path(source)) if local else hub_splits(source)
    train_name = "train" if "train" in splits else next(iter(splits))
    test_name = next((n for n in TEST_SPLITS if n in splits and n != train_name), None)
    places: list[str] = []

    def parsed(rows: Rows) -> list[Example]:
        examples = []
        for where, fields in rows:
            examples.append(parse_record(where, fields, data.task == "gsm8k", settings.columns))
            places.append(where)
        return examples

    # 2. Read the splits. If there is no test split, hold out some training rows for it.
    if test_name is None:
        every = parsed(splits[train_name]())
        notes = _unusual_answers(every, places)
        train, test = _hold_out(every, settings.n_test, source)
    else:
        train = parsed(splits[train_name]()) if needs_train else []
        test = parsed(splits[test_name]())
        notes = _unusual_answers([*train, *test], places)
    # 3. Remove test prompts from the training split, unless the split would become empty.
    known = {repr(e.prompt) for e in test}
    different = [e for e in train if repr(e.prompt) not in known]
    if train and not different:
        notes.append("every training prompt is a test prompt: the evaluation is of these")
    elif len(different) < len(train):
        skipped = len(train) - len(different)
        notes.append(f"{skipped} training rows are skipped: their prompts are test prompts")
    return Survey(different or train, test, notes)


def _settings(data: DataSource | None) -> SimpleNamespace:
    """Return the attributes of `data` that file sources use. A missing attribute becomes None."""
    return SimpleNamespace(**{name: getattr(data, name, None) for name in SETTINGS})


def _form(settings: SimpleNamespace) -> Form:
    return Form.of(settings.prompt_template, settings.system_prompt, bool(settings.chat))


def _unusual_answers(examples: list[Example], places: list[str]) -> list[str]:
    """Return a warning, as a list of one text, if only some of the gold answers are numbers.

    Otherwise, return an empty list.
    """
    with_answer = [(e, p) for e, p in zip(examples, places, strict=True) if e.answer is not None]
    unusual = [(e, p) for e, p in with_answer if parse_number(str(e.answer)) is None]
    if not unusual or len(unusual) == len(with_answer):
        return []
    example, place = unusual[0]
    judged = "they are judged as expressions or texts"
    count = f"{len(unusual)} of {len(with_answer)} gold answers are no numbers"
    return [f"{count}, the first at {place}: {str(example.answer)[:40]!r}; {judged}"]


def _hold_out(
    examples: list[Example], n_test: int | None, source: object
) -> tuple[list[Example], list[Example]]:
    """Choose random examples as test examples. Return the training and the test examples.

    There are `n_test` test examples, by default a tenth of all examples.
    """
    count = max(1, len(examples) // 10) if n_test is None else n_test
    expected = f"at most the {len(examples)} lines of {source}"
    need(count <= len(examples), "data.n_test", expected, count)
    order = list(range(len(examples)))
    random.Random(SPLIT_SEED).shuffle(order)
    held_out = set(order[:count])
    test = [e for i, e in enumerate(examples) if i in held_out]
    train = [e for i, e in enumerate(examples) if i not in held_out]
    return train or examples, test
