"""Helpers that train recipes with tiny models, and read the results of a run.

They also interrupt a run at a chosen point and resume it.
"""

import functools
import json
import signal
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from grpo_fast import rollout
from grpo_fast.train import loop
from grpo_fast.train.config import load_recipe
from grpo_fast.train.policy import Policy
from grpo_fast.train.ranks import Stopping
from grpo_fast.train.report.page import read_parquet
from grpo_fast.train.report.report import RunReport
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


def train_recipe(
    folder: Path, recipe: str, *overrides: str
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Train a recipe, and return the summary of the run and one row of metrics per step."""
    config = load_recipe(recipe, [*overrides, f"output_dir={folder}"])
    summary, rows = loop.train(config), steps_of(folder)
    assert len(rows) == config.steps
    return summary, rows


def sort(folder: Path, *overrides: str) -> list[dict[str, Any]]:
    return train_recipe(folder, "sort", *TINY_SORT, *overrides)[1]


TINY = ["model.config.hidden_size=16", "model.config.intermediate_size=32", "data.n_test=4",
        "model.config.num_hidden_layers=1", "model.config.num_attention_heads=2",
        "model.config.num_key_value_heads=2", "rollout.prompts_per_step=2", "rollout.group_size=4",
        "rollout.max_new_tokens=6", "log.progress=false", "steps=3", "eval.every=2",
        "log.completions_every=1", "tokens_per_microbatch=30"]  # fmt: skip


def opened(folder: Path, config: Any, **options: Any) -> RunReport:
    """Create the folder of a new run, and return the `RunReport` that writes the run's logs."""
    config = config.model_copy(update={"output_dir": str(folder)})
    report = RunReport(config, **options)
    folder.mkdir(parents=True, exist_ok=True)
    report.begin()
    return report


def config_of(folder: Path, *overrides: str, recipe: str = "sort") -> Any:
    words = [*(TINY if recipe == "sort" else []), *overrides, f"output_dir={folder}"]
    return load_recipe(recipe, words)


def run(folder: Path, *overrides: str, recipe: str = "sort") -> dict[str, Any]:
    """Start or resume a training run in `folder`, and return its results (see `result`)."""
    loop.train(config_of(folder, *overrides, recipe=recipe))
    return result(folder)


def result(folder: Path) -> dict[str, Any]:
    """Read all results of a run that must be the same if the run is interrupted and resumed.

    The results are the metrics except timings, the prompts, the completions, parts of the summary,
    and the bytes of every saved tensor.
    """
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [{k: v for k, v in json.loads(x).items() if not is_timing(k)} for x in lines]
    found: dict[str, Any] = {
        "metrics": rows,
        "prompts": {
            path.name: [row["prompt"] for row in read_parquet(path)]
            for path in sorted((folder / "completions").glob("*"))
        },
    }
    if (folder / "completions.html").exists():
        page = (folder / "completions.html").read_text(encoding="utf-8")
        found["page"] = page.replace(folder.name, "NAME")
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    found["summary"] = {key: summary[key] for key in ("before", "after", "steps", "num_tokens")}
    for path in sorted(folder.glob("*/*.safetensors")):
        for name, tensor in load_file(path).items():
            raw = tensor.numpy().tobytes()
            found[f"{path.parent.name}/{path.name}:{name}"] = raw
    return found


class Leave:
    """Patch that sends SIGTERM to a run at the `at`-th of certain calls.

    The calls are forward passes of training, rollouts, and the ends of steps. The attribute
    `passes` counts them. Early calls, which a warm start makes before the run can save a
    checkpoint, do not count. If `before` is True, only the early calls count.
    """

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, at: int | None, *, before: bool = False
    ) -> None:
        self.passes = 0
        self.stopping: Stopping | None = None
        patched = self

        class Recorded(Stopping):
            def __init__(self) -> None:
                super().__init__()
                patched.stopping = self

        monkeypatch.setattr("grpo_fast.train.ranks.Stopping", Recorded)
        for owner, name in (
            (Policy, "hidden"),
            (rollout, "generate"),
            (Stopping, "raise_together"),
        ):
            monkeypatch.setattr(owner, name, self.counted(getattr(owner, name), at, before))

    def counted(self, own: Any, at: int | None, before: bool) -> Any:
        @functools.wraps(own)
        def call(*arguments: Any, **options: Any) -> Any:
            # A call is early if the loop has not yet replaced `may_stop`.
            stopping = self.stopping
            if stopping and (stopping.may_stop.__module__ == loop.__name__) != before:
                self.passes += 1
                if self.passes == at:
                    stopping.receive(signal.SIGTERM)
            return own(*arguments, **options)

        return call
