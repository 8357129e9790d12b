"""Examples of a file, a folder or a hub dataset: GSM8K, or any prompts with answers."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from grpo_fast.data.answers import parse_number
from grpo_fast.data.example import DatasetError, DataSource, Example, need
from grpo_fast.data.prompts import Form, ShotPrompts
from grpo_fast.data.readers import (
    TEST_SPLITS,
    Rows,
    hub_splits,
    is_local,
    local_splits,
    read_file,
    read_jsonl,
)
from grpo_fast.data.records import parse_record
from grpo_fast.errors import conflict

__all__ = ["is_local", "load_file_examples", "read_examples", "read_jsonl", "survey"]

log = logging.getLogger(__name__)

SPLIT_SEED = "grpo_fast held-out lines"


class Survey(NamedTuple):
    """The splits of a source, and what a reader of the log should know about them."""

    train: list[Example]
    test: list[Example]
    notes: list[str]


def load_file_examples(
    data: DataSource, *, split: str, seed: int, count_tokens: Callable[[str], int] | None = None
) -> Sequence[Example]:
    """Train or test examples of a file, folder or hub dataset; see `load_examples`."""
    option = {name: getattr(data, name, None) for name in _OPTIONS}
    form = Form.of(option["prompt_template"], option["system_prompt"], bool(option["chat"]))
    shots, budget = option["shots"] or 0, option["shots_tokens"]
    source = option["path"] or option["name"]
    needs_train = split == "train" or shots > 0 or budget is not None
    train, test, notes = survey(data, needs_train)
    for note in notes if split == "train" else ():
        log.warning("data: %s", note)
    need(shots <= len(train), "data.shots", f"at most the {len(train)} training examples", shots)
    need(test, "data", f"at least one test example in {source}", "none")
    if split == "test":
        chosen = test[: option["n_test"]]
    else:
        chosen = train[shots:][: option["n_train"]]
        expected = f"a training example in {source} whose prompt is not a test prompt as well"
        need(chosen, "data", expected, f"none after data.shots = {shots}" if shots else "none")
        random.Random(f"{seed}/order").shuffle(chosen)
    if budget is None:
        prefix = "".join(form.shot(e) for e in train[:shots])
        return [form.dress(e, prefix) for e in chosen]
    if count_tokens is None:
        why = "the examples are counted in tokens; pass a function"
        raise conflict("count_tokens=None", f"data.shots_tokens={budget}", why)
    pool = [e for e in train if isinstance(e.prompt, str)]
    draws = seed if split == "train" else "test"
    return ShotPrompts(chosen, pool, form, budget=budget, count_tokens=count_tokens, seed=draws)


_OPTIONS = (
    "path", "name", "prompt_template", "system_prompt", "chat", "shots", "shots_tokens", "n_train",
    "n_test", "columns",
)  # fmt: skip


def read_examples(path: str | Path, *, data: DataSource | None = None) -> list[Example]:
    """Return every row of one file, in its order, with the prompt template applied.

    Args:
        path: a file that `read_file` reads.
        data: a config with `task`, `columns`, `prompt_template`, `system_prompt` and `chat`.
    """
    option = {name: getattr(data, name, None) for name in _OPTIONS}
    form = Form.of(option["prompt_template"], option["system_prompt"], bool(option["chat"]))
    is_gsm8k = getattr(data, "task", None) == "gsm8k"
    return [
        form.dress(parse_record(*row, is_gsm8k, option["columns"])) for row in read_file(Path(path))
    ]


def survey(data: DataSource, needs_train: bool = True) -> Survey:
    """Read the splits of a source, without a prompt template.

    Without a test split some rows are held out, the same ones whatever the run's seed is.
    """
    option = {name: getattr(data, name, None) for name in _OPTIONS}
    path, name = option["path"], option["name"]
    if not (path or name):
        expected = "data.path (a file or a folder) or data.name (a hub id)"
        raise DatasetError(f"data: expected {expected}, got neither")
    splits = local_splits(Path(path)) if path else hub_splits(name)
    train_name = "train" if "train" in splits else next(iter(splits))
    test_name = next((n for n in TEST_SPLITS if n in splits and n != train_name), None)
    places: list[str] = []

    def parsed(rows: Rows) -> list[Example]:
        examples = []
        for where, fields in rows:
            examples.append(parse_record(where, fields, data.task == "gsm8k", option["columns"]))
            places.append(where)
        return examples

    if test_name is None:
        every = parsed(splits[train_name]())
        notes = _other_answers(every, places)
        train, test = _hold_out(every, option["n_test"], path or name)
    else:
        train = parsed(splits[train_name]()) if needs_train else []
        test = parsed(splits[test_name]())
        notes = _other_answers([*train, *test], places)
    known = {repr(e.prompt) for e in test}
    others = [e for e in train if repr(e.prompt) not in known]
    if train and not others:
        notes.append("every training prompt is a test prompt: the evaluation is of these")
    elif len(others) < len(train):
        skipped = len(train) - len(others)
        notes.append(f"{skipped} training rows are skipped: their prompts are test prompts")
    return Survey(others or train, test, notes)


def _other_answers(examples: list[Example], places: list[str]) -> list[str]:
    """Say how many gold answers are no numbers, unless all or none of them are."""
    with_answer = [(e, p) for e, p in zip(examples, places, strict=True) if e.answer is not None]
    others = [(e, p) for e, p in with_answer if parse_number(str(e.answer)) is None]
    if not others or len(others) == len(with_answer):
        return []
    example, place = others[0]
    judged = "they are judged as expressions or texts"
    count = f"{len(others)} of {len(with_answer)} gold answers are no numbers"
    return [f"{count}, the first at {place}: {str(example.answer)[:40]!r}; {judged}"]


def _hold_out(
    examples: list[Example], n_test: int | None, source: Any
) -> tuple[list[Example], list[Example]]:
    count = max(1, len(examples) // 10) if n_test is None else n_test
    expected = f"at most the {len(examples)} lines of {source}"
    need(count <= len(examples), "data.n_test", expected, count)
    order = list(range(len(examples)))
    random.Random(SPLIT_SEED).shuffle(order)
    held_out = set(order[:count])
    test = [e for i, e in enumerate(examples) if i in held_out]
    train = [e for i, e in enumerate(examples) if i not in held_out]
    return train or examples, test
