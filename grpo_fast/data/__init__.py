"""Examples for training and evaluation, which are read from files or the hub, or generated."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from grpo_fast.data.escape import escape_control, reason
from grpo_fast.data.example import DatasetError, DataSource, Example, Prompt, need, words_of
from grpo_fast.data.files import load_file_examples, read_examples
from grpo_fast.data.generated import ArithmeticTask, GeneratedTask, SortTask, open_examples
from grpo_fast.data.readers import is_local
from grpo_fast.data.traces import load_traces, read_traces, trace_examples

__all__ = [
    "DataSource",
    "DatasetError",
    "Example",
    "FILES",
    "Prompt",
    "TASKS",
    "TRACES",
    "escape_control",
    "is_local",
    "load_examples",
    "load_traces",
    "read_examples",
    "read_traces",
    "reason",
    "task_symbols",
]

GENERATED: dict[str, type[GeneratedTask]] = {"sort": SortTask, "arithmetic": ArithmeticTask}
TRACES = "traces"
FILES = ("gsm8k", "jsonl")
TASKS = (*GENERATED, "open", *FILES, TRACES)


def load_examples(
    data: DataSource, *, split: str, seed: int, count_tokens: Callable[[str], int] | None = None
) -> Sequence[Example]:
    """Return the examples of one split.

    The attributes that `data` must have depend on its `task`. Other attributes may be missing.

    - sort, arithmetic: `digits`, `n_train`, `n_test`.
    - gsm8k, jsonl: `path` (a file, a folder or a hub id), and optionally `columns`,
      `prompt_template`, `system_prompt`, `chat`, `shots_tokens`, `n_train`, `n_test`.
    - open: no attributes. This package contains the prompts, and both splits are equal.
    - traces: `path`, a file of recorded rollouts of agents. Each task in the file gives one
      example.

    Args:
        data: the section `data` of a configuration, or any object with these attributes.
        split: "train" or "test". If a prompt is in both splits, it is removed from the training
            split, unless that split would then be empty.
        seed: seed of the training split's order. The test split does not depend on the seed, so
            that runs can be compared.
        count_tokens: function that returns the number of tokens of a text. Required by
            `shots_tokens`.

    Raises:
        DatasetError: a ValueError. The task or split is unknown, a file or package is missing, or a
            row is bad (`file:line: reason`).
    """
    need(split in ("train", "test"), "split", "'train' or 'test'", repr(split))
    if data.task in GENERATED:
        task = GENERATED[data.task]
        options = {x: getattr(data, x, None) for x in (*task.options, "n_train", "n_test")}
        given = {name: value for name, value in options.items() if value is not None}
        return task(split=split, seed=seed, **given)
    if data.task == "open":
        return open_examples()
    if data.task == TRACES:  # nothing is sampled, so the splits may be equal
        return trace_examples(str(getattr(data, "path", None)))
    if data.task in FILES:
        return load_file_examples(data, split=split, seed=seed, count_tokens=count_tokens)
    raise DatasetError(f"data.task: expected one of {', '.join(TASKS)}, got {data.task!r}")


def task_symbols(data: DataSource, examples: Iterable[Example] | None = None) -> list[str]:
    """Return all words of a task's prompts, answers and solutions, for `build_symbol_tokenizer`.

    Args:
        data: the section `data` of a configuration.
        examples: examples of both splits. None loads the examples.
    """
    if data.task in GENERATED:
        task: Any = load_examples(data, split="test", seed=0)
        return task.vocabulary
    if examples is None:
        train = load_examples(data, split="train", seed=0)
        test = load_examples(data, split="test", seed=0)
        examples = [*train, *test]
    return sorted({word for example in examples for word in words_of(example)})
