"""`grpo-fast compare`: a recipe under every setting of a grid, with several seeds, side by side.

A run that is finished is not run again; one that was cut off begins anew.
"""

from __future__ import annotations

import itertools
import json
import math
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from grpo_fast.data import escape_control, reason
from grpo_fast.train.config import RunConfig, require
from grpo_fast.train.config.recipes import load_recipe
from grpo_fast.train.config.words import grid_values
from grpo_fast.train.evaluation.evaluate import mean_and_error
from grpo_fast.train.experiments import compare_plot
from grpo_fast.train.files import plain_json
from grpo_fast.train.report.curves import Rows, read_metrics, series
from grpo_fast.train.runs.folder import locked

MOST_RUNS = 1000
# Column of the table → metric. Of a training metric the last tenth of the steps is averaged.
COLUMNS = {
    "reward": "reward",
    "held-out reward": "eval_reward",
    "strict accuracy": "eval_accuracy_strict",
    "loss": "loss",
    "gradient variance": "grad_variance",
    "KL": "kl",
    "trainer / sampler": "sampling/importance_sampling_ratio/mean",
}


class Arm(NamedTuple):
    name: str  # of its folder and in the picture, such as loss_type=grpo,advantages=max
    values: dict[str, str]  # key of the grid → value
    runs: list[RunConfig]  # one for each seed, each with its own output_dir


@dataclass
class Comparison:
    recipe: str
    arms: list[Arm]
    rows: dict[str, list[Rows]] = field(default_factory=dict)  # arm → metrics.jsonl of those `done`
    failed: dict[str, str] = field(default_factory=dict)  # folder of a run → why it ended early

    def done(self, arm: Arm) -> list[RunConfig]:
        """The runs of an arm that came to their end, in the order of `rows`."""
        return [config for config in arm.runs if config.output_dir not in self.failed]

    def values(self, arm: Arm, metric: str) -> list[float | None]:
        """The mean of each run over the last tenth of the metric, at least its last value."""
        logged = [series(rows, metric) for rows in self.rows[arm.name]]
        tails = [points[-max(1, len(points) // 10) :] for points in logged]
        return [sum(v for _, v in tail) / len(tail) if tail else None for tail in tails]

    def cell(self, arm: Arm, metric: str) -> tuple[float, float] | None:
        values = [value for value in self.values(arm, metric) if value is not None]
        return mean_and_error(values) if values else None


def compare(
    recipe: str,
    words: Sequence[str],
    *,
    seeds: int = 1,
    out: str | Path | None = None,
    run: Callable[[RunConfig], Any],
    say: Callable[[str], None] = print,
) -> Comparison:
    """Run what is missing and write table, picture and numbers.

    Args:
        recipe: a recipe's name or file, or several with commas between them.
        words: `key=a,b` are the keys of the grid, `key=a` is a change to every run.
        seeds: runs of each setting, with the seeds config.seed, config.seed + 1, …
        out: the folder; None: runs/compare-<recipe>.
        run: trains by a configuration, as `grpo_fast.train.loop.train`.

    Raises ValueError for a setting that any of the runs refuses, before the first one starts, and
    for a folder that holds runs of other settings.
    """
    stems = "-".join(Path(name).stem for name in recipe.split(","))
    folder = Path(out) if out is not None else Path("runs") / f"compare-{stems}"
    comparison = Comparison(recipe, plan_arms(recipe, words, seeds, folder))
    runs = [config for arm in comparison.arms for config in arm.runs]
    finished = {config.output_dir: is_finished(config) for config in runs}
    for number, config in enumerate(runs, start=1):
        label = f"run {number} of {len(runs)}: {config.output_dir}"
        if finished[config.output_dir]:
            say(f"{label} (finished before)")
            continue
        say(label)
        try:
            with locked(config.output_dir):  # another process may be writing this very run
                shutil.rmtree(config.output_dir, ignore_errors=True)  # cut off: see `is_finished`
            run(config)
        except (RuntimeError, OSError, ValueError) as error:
            comparison.failed[config.output_dir] = escape_control(reason(error))
            say(f"{config.output_dir} failed: {comparison.failed[config.output_dir]}")
    for arm in comparison.arms:
        comparison.rows[arm.name] = [
            read_metrics(config.output_dir) for config in comparison.done(arm)
        ]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "table.md").write_text(table(comparison), encoding="utf-8")
    (folder / "compare.json").write_text(json.dumps(numbers(comparison), indent=2) + "\n", "utf-8")
    if any(comparison.rows.values()):
        settings = {arm.name: arm.values for arm in comparison.arms}
        say(f"picture: {compare_plot.plot(comparison.rows, settings, folder / 'compare.png')}")
    return comparison


def plan_arms(recipe: str, words: Sequence[str], seeds: int, folder: Path) -> list[Arm]:
    """Every setting of the grid with its configurations. Raises ValueError for one refused."""
    require(seeds >= 1, "seeds", "at least 1", seeds)
    parsed = [grid_values(word) for word in words]
    axes = {key: values for key, values in parsed if len(values) > 1}
    common = [word for word, (_, values) in zip(words, parsed, strict=True) if len(values) == 1]
    fits = len({key for key, _ in parsed}) == len(parsed)
    require(fits, "settings", "each key once", " ".join(words))
    recipes = recipe.split(",")
    count = seeds * math.prod(map(len, [recipes, *axes.values()]))
    require(count <= MOST_RUNS, "grid", f"at most {MOST_RUNS} runs", count)
    arms = []
    for chosen, *values in itertools.product(recipes, *axes.values()):
        setting = dict(zip(axes, values, strict=True))
        first = load_recipe(chosen, [*common, *(f"{key}={x}" for key, x in setting.items())])
        if len(recipes) > 1:
            setting = {"recipe": Path(chosen).stem, **setting}
        parts = [f"{key.rpartition('.')[2]}={value}" for key, value in setting.items()]
        name = re.sub(r"[^\w.+=,-]+", "-", ",".join(parts) or Path(chosen).stem)[:120]
        runs = []
        for index in range(seeds):
            place = folder / name / f"seed-{first.seed + index}"
            changes = {"seed": first.seed + index, "output_dir": str(place)}
            runs.append(first.model_copy(update=changes))
        arms.append(Arm(name, setting, runs))
    fits = len({arm.name for arm in arms}) == len(arms)
    require(fits, "grid", "settings that differ", " ".join(words))
    return arms


def is_finished(config: RunConfig) -> bool:
    """Whether this very run lies in its folder, whole. Raises ValueError for another's folder."""
    folder = Path(config.output_dir)
    if not folder.is_dir() or not any(folder.iterdir()):
        return False
    saved = folder / "config.yaml"
    differing = ["no config.yaml"]
    if saved.is_file():
        old, new = load_recipe(str(saved)).model_dump(), config.model_dump()
        differing = [key for key in new if new[key] != old[key]]
    if differing:
        raise ValueError(
            f"out: expected an empty folder or runs of these settings, {folder} holds others "
            f"({', '.join(differing)}); choose another folder with -o"
        )
    return (folder / "summary.json").is_file()


def table(comparison: Comparison) -> str:
    runs = [run for arm in comparison.arms for run in comparison.rows[arm.name]]
    shown = [name for name, metric in COLUMNS.items() if compare_plot.is_telling(runs, metric)]
    lines = [" | ".join(["| setting", *shown, "runs |"]), "|" + "---|" * (len(shown) + 2)]
    for arm in comparison.arms:
        cells = []
        for name in shown:
            mean, error = comparison.cell(arm, COLUMNS[name]) or (None, math.nan)
            spread = f" ± {error:.2g}" if error == error else ""
            cells.append("–" if mean is None else f"{mean:.4g}{spread}")
        count = len(comparison.rows[arm.name])
        lost = f" ({len(arm.runs) - count} failed)" if count < len(arm.runs) else ""
        lines.append(" | ".join([f"| {arm.name}", *cells, f"{count}{lost} |"]))
    return "\n".join(lines) + "\n"


def numbers(comparison: Comparison) -> dict[str, Any]:
    arms = [
        {
            "setting": arm.name, "values": arm.values,
            "seeds": [config.seed for config in comparison.done(arm)],
            "metrics": {name: comparison.values(arm, name) for name in COLUMNS.values()},
        }
        for arm in comparison.arms
    ]  # fmt: skip
    return plain_json({"recipe": comparison.recipe, "arms": arms, "failed": comparison.failed})
