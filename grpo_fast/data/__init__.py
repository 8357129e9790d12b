"""Examples for a run: files, the hub, or tasks made on the spot, all with the same three fields."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from grpo_fast.data.escape import escape_control, reason
from grpo_fast.data.example import DatasetError, DataSource, Example, Prompt, need, words_of
from grpo_fast.data.files import is_local, load_file_examples, read_examples
from grpo_fast.data.generated import ArithmeticTask, SortTask, open_examples
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

GENERATED: dict[str, Any] = {"sort": SortTask, "arithmetic": ArithmeticTask}
TRACES = "traces"
FILES = ("gsm8k", "jsonl")
TASKS = (*GENERATED, "open", *FILES, TRACES)


def load_examples(
    data: DataSource, *, split: str, seed: int, count_tokens: Callable[[str], int] | None = None
) -> Sequence[Example]:
    """The examples of one split, in an order fixed by `seed`.

    Args:
        data: a config with `task`, and per task
            sort / arithmetic: `digits` (length), `symbols` (how many different ones), `n_train`,
            `n_test`;
            traces: `path`, recorded rollouts of agents; an example is a task's name;
            open: nothing, the prompts are listed here and the same in both splits;
            gsm8k / jsonl: `path` (a jsonl, json, csv, tsv or parquet file, or a folder) or `name`
            (hub id), `columns`, `prompt_template`, `system_prompt`, `chat`, `shots`, `n_train`,
            `n_test` (None: all), `shots_tokens` (as many worked examples as this many tokens hold,
            drawn from train for each question by itself).
            Attributes a source does not need may be absent.
        split: "train" or "test". No test prompt occurs in train, unless they all do.
        seed: shuffles train. The test split is the same for every seed: runs can be compared.
        count_tokens: tokens of a text; needed by `shots_tokens` only.

    Raises:
        DatasetError (a ValueError): an unknown task or split, a missing file or package, a bad line
            (`file:line: why`).
    """
    need(split in ("train", "test"), "split", "'train' or 'test'", repr(split))
    if data.task in GENERATED:
        task = GENERATED[data.task]
        options = {x: getattr(data, x, None) for x in (*task.options, "n_train", "n_test")}
        said = {name: value for name, value in options.items() if value is not None}
        return task(split=split, seed=seed, **said)
    if data.task == "open":
        return open_examples()
    if data.task == TRACES:  # both splits: nobody is asked
        return trace_examples(str(getattr(data, "path", None)))
    if data.task in FILES:
        return load_file_examples(data, split=split, seed=seed, count_tokens=count_tokens)
    raise DatasetError(f"data.task: expected one of {', '.join(TASKS)}, got {data.task!r}")


def task_symbols(data: DataSource, examples: Iterable[Example] | None = None) -> list[str]:
    """The symbols of a task, for `build_symbol_tokenizer`; for a file all its words, sorted.

    examples: those of both splits, where they are loaded already.
    """
    if data.task in GENERATED:
        task: Any = load_examples(data, split="test", seed=0)
        return task.vocabulary
    if examples is None:
        train, test = (load_examples(data, split=split, seed=0) for split in ("train", "test"))
        examples = [*train, *test]
    return sorted({word for example in examples for word in words_of(example)})
