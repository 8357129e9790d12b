"""Examples for training and evaluation, which are read from files or the hub, or generated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from grpo_fast.data.escape import escape_control, reason
from grpo_fast.data.example import Example, Prompt
from grpo_fast.data.files import Survey, file_splits, read_examples, read_splits
from grpo_fast.data.generated import SortTask, open_examples
from grpo_fast.data.traces import load_traces, read_traces, trace_examples

__all__ = [
    "Example",
    "FILES",
    "Prompt",
    "TASKS",
    "TRACES",
    "escape_control",
    "load_splits",
    "load_traces",
    "read_examples",
    "read_traces",
    "reason",
]

TRACES = "traces"
FILES = ("gsm8k", "jsonl")
TASKS = ("sort", "open", *FILES, TRACES)


def load_splits(
    data: Any, seed: int, count_tokens: Callable[[str], int], found: Survey | None = None
) -> tuple[Sequence[Example], Sequence[Example]]:
    """Return the training examples and the test examples of a data set.

    If a prompt is in both splits, it is removed from the training split, unless the training split
    would then be empty. The task `open` has the same examples in both splits, and so has `traces`.

    Args:
        data: the section `data` of a configuration.
        seed: seed of the training split's order. The test split does not depend on the seed, so
            that runs can be compared.
        count_tokens: function that returns the number of tokens of a text. It is called only if
            `data.shots_tokens` is set.
        found: result of `read_splits` for the tasks that read files. None reads the files.

    Raises:
        ValueError: a file or package is missing, or a row is bad (`file:line: reason`).
    """
    if data.task == "sort":
        options = {"seed": seed, "n_test": data.n_test}
        train, test = (SortTask(data.digits, split=x, **options) for x in ("train", "test"))
        return train, test
    if data.task == "open":
        return open_examples(), open_examples()
    if data.task == TRACES:  # nothing is sampled, so the splits may be equal
        examples = trace_examples(data.path)
        return examples, examples
    return file_splits(found or read_splits(data), data, seed, count_tokens)
