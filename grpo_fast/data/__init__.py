"""Examples for a run: files, the hub, or tasks made on the spot.

`load_examples(data, split=..., seed=...)` is the only door; every source gives the same three fields.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from grpo_fast.data.example import DatasetError, DataSource, Example, Prompt
from grpo_fast.data.files import load_file_examples
from grpo_fast.data.generated import ArithmeticTask, SortTask

__all__ = ["DataSource", "DatasetError", "Example", "Prompt", "TASKS", "load_examples", "task_symbols"]

TASKS = ("sort", "arithmetic", "gsm8k", "jsonl")


def load_examples(
    data: DataSource, *, split: str, seed: int, count_tokens: Callable[[str], int] | None = None
) -> Sequence[Example]:
    """The examples of one split, in an order fixed by `seed`.

    Args:
        data: a config with `task`, and per task
            sort / arithmetic: `digits` (length), `symbols` (how many different ones), `n_train`, `n_test`;
            gsm8k / jsonl: `path` (a .jsonl file, or a folder with train.jsonl and test.jsonl) or `name` (hub id),
            `prompt_template`, `system_prompt`, `chat`, `shots`, `n_train`, `n_test` (None: all), `shots_tokens` (as
            many worked examples as this many tokens hold, drawn from train for each question by itself).
            Attributes a source does not need may be absent.
        split: "train" or "test". No test prompt ever occurs in train.
        seed: shuffles train. The test split is the same for every seed, so that runs can be compared.
        count_tokens: tokens of a text; needed by `shots_tokens` only.

    Raises:
        DatasetError (a ValueError): an unknown task or split, a missing file or package, a bad line (`file:line: why`).
    """
    if split not in ("train", "test"):
        raise DatasetError(f"split: expected 'train' or 'test', got {split!r}")
    task = getattr(data, "task", None) or ("jsonl" if getattr(data, "path", None) else "gsm8k")
    if task == "sort":
        return _generated(SortTask, data, split, seed)
    if task == "arithmetic":
        return _generated(ArithmeticTask, data, split, seed)
    if task in ("gsm8k", "jsonl"):
        return load_file_examples(data, gsm8k=task == "gsm8k", split=split, seed=seed, count_tokens=count_tokens)
    raise DatasetError(f"data.task: expected one of {', '.join(TASKS)}, got {task!r}")


def task_symbols(data: DataSource) -> list[str]:
    """The symbols a generated task uses, for `build_symbol_tokenizer`."""
    task = getattr(data, "task", None)
    if task == "sort":
        return SortTask.vocabulary(**_options(SortTask, data))
    if task == "arithmetic":
        return ArithmeticTask.vocabulary(**_options(ArithmeticTask, data))
    raise DatasetError(f"data.task: a symbol tokenizer needs sort or arithmetic, got {task!r}; use tokenizer: bpe")


def _options(cls: type[SortTask | ArithmeticTask], data: DataSource) -> dict[str, int]:
    given = {name: getattr(data, name, None) for name in cls.options}
    return {name: int(value) for name, value in given.items() if value is not None}


def _generated(cls: type[SortTask | ArithmeticTask], data: DataSource, split: str, seed: int) -> Sequence[Example]:
    counts = {name: getattr(data, name, None) for name in ("n_train", "n_test")}
    return cls(split=split, seed=seed, **_options(cls, data), **{k: int(v) for k, v in counts.items() if v is not None})
