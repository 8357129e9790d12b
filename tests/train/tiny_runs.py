"""Helpers that train recipes with tiny models and read the logged metrics of a run."""

import json
from pathlib import Path
from typing import Any

from grpo_fast.train import loop
from grpo_fast.train.config import load_recipe
from tests.data.test_data import write_lines

TINY_SORT = ["model.config.hidden_size=32", "model.config.intermediate_size=64", "data.n_test=16",
             "model.config.num_hidden_layers=2", "rollout.prompts_per_step=4",
             "rollout.group_size=4", "log.progress=false", "log.save_model=false",
             "steps=3"]  # fmt: skip


def is_timing(name):
    """Return True for the names of timing metrics, which differ even between identical runs."""
    return name == "step_time" or name.startswith("perf/") or name.endswith("_time")


def questions(folder: Path, train: int = 30, test: int = 10) -> str:
    """Write a small data set in the format of GSM8K, and return its folder.

    `train` and `test` are the numbers of questions in each split.
    """
    folder.mkdir(exist_ok=True)
    lines = [
        {"question": f"Tom has {i} apples, then {i + 1} more. Sum?",
         "answer": f"{i} + {i + 1}\n#### {2 * i + 1}"} for i in range(train + test)
    ]  # fmt: skip
    for name, part in (("train", lines[:train]), ("test", lines[train:])):
        if part:
            write_lines(folder / f"{name}.jsonl", *part)
    return str(folder)


def logged(folder: Path) -> list[dict[str, Any]]:
    """Return all rows of the file metrics.jsonl in the folder of a run, including timings."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def steps_of(folder: Path) -> list[dict[str, Any]]:
    """Return the logged metrics of all training steps of a run, without timings."""
    return [
        {k: v for k, v in row.items() if not is_timing(k)}
        for row in logged(folder)
        if "loss" in row
    ]


def run(folder: Path, recipe: str, *overrides: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Train a recipe, and return the summary of the run and one row of metrics per step."""
    config = load_recipe(recipe, [*overrides, f"output_dir={folder}"])
    summary, rows = loop.train(config), steps_of(folder)
    assert len(rows) == config.steps
    return summary, rows


def sort(folder: Path, *overrides: str) -> list[dict[str, Any]]:
    return run(folder, "sort", *TINY_SORT, *overrides)[1]
