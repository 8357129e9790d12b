"""Train every setting of a grid with several seeds, and compare them in a table and a picture.

    python -m benchmarks.experiments.compare sort advantages=centered,rloo --seeds 3 [-o FOLDER]
    python -m benchmarks.experiments.compare sort,ppo-sort --seeds 2

`key=a,b` adds a configuration key with two values to the grid. `key=a` sets the key in every run. A
run that has finished is not repeated. A run that was interrupted starts again from step 1.

The command writes two files to the folder. `table.md` has one row for each setting. A cell is the
mean of the last tenth of the steps, ± the standard error over the seeds. A cell of an
evaluation metric also has the value before training. `compare.png` shows the curves of all
settings, and one more row of panels for each key of the grid. The shaded bands show one standard
error on each side of a curve.
"""

from __future__ import annotations

import itertools
import math
import re
import shutil
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from benchmarks import measure
from benchmarks.options import new_parser
from grpo_fast.errors import require
from grpo_fast.train import loop
from grpo_fast.train.config import RunConfig
from grpo_fast.train.config.recipes import load_recipe
from grpo_fast.train.config.words import split_word
from grpo_fast.train.evaluation.evaluate import mean_and_error
from grpo_fast.train.report import curves
from grpo_fast.train.report.curves import Rows, Series, series

# For each logged metric: the title of its column in the table, and the title of its panel in the
# picture, or "" if the picture does not show it.
METRICS = {
    "reward": ("reward", "Reward"),
    "eval_reward": ("held-out reward", ""),
    "loss": ("loss", "Loss"),
    "eval_accuracy_strict": ("strict accuracy", "Accuracy on held-out prompts"),
    "grad_variance": ("gradient variance", "Variance of the gradient"),
    "kl": ("KL", "KL to the reference"),
    "sampling/importance_sampling_ratio/mean": (
        "trainer / sampler", "Trainer's probability over sampler's",
    ),
}  # fmt: skip
# Neutral values of metrics. A metric is only shown if one of its values differs from its neutral
# value by more than TELLING. A metric without a neutral value is always shown.
NEUTRAL = {"sampling/importance_sampling_ratio/mean": 1.0}
TELLING = 0.01
COLUMNS = 3  # maximum number of panels in a row
MOST_LINES = 8  # for more settings, the panels that show all settings are left out
# The axis of the gradient variance is logarithmic. Its lower end is this fraction of its upper end,
# because a run that ends with variance 0 would stretch the axis without limit.
SMALLEST = 1e-4


class Arm(NamedTuple):
    """One setting of the grid, which is trained with several seeds.

    Attributes:
        name: such as "loss_type=grpo,advantages=max". It names the setting's folder and its curve.
        values: the value of each key of the grid.
        runs: the configurations of the runs, one for each seed.
    """

    name: str
    values: dict[str, str]
    runs: list[RunConfig]


# ------------------------------------------------------------------------------------------- runs
def grid_values(word: str) -> tuple[str, list[str]]:
    """Split `key=a,b` into the key and its values. Commas in brackets or quotes are kept."""
    key, text = split_word(word)
    listed: Any = yaml.compose(f"[{text}]", yaml.SafeLoader)
    slices = [text[item.start_mark.index - 1 : item.end_mark.index - 1] for item in listed.value]
    require(not text.rstrip().endswith(","), "grid", "a value between the commas", repr(word))
    return key, slices if len(slices) > 1 else [text]


def plan_arms(recipe: str, words: Sequence[str], seeds: int, folder: Path) -> list[Arm]:
    """Return all settings of the grid, each with the validated configurations of its runs."""
    parsed = [grid_values(word) for word in words]
    require(seeds >= 1, "seeds", "at least 1", seeds)
    require(len({key for key, _ in parsed}) == len(parsed), "settings", "each key once", words)
    axes = {key: values for key, values in parsed if len(values) > 1}
    common = [word for word, (_, values) in zip(words, parsed, strict=True) if len(values) == 1]
    recipes = recipe.split(",")
    example = "KEY=A,B, two recipes, or --seeds 2, for example compare sort optim.lr=1e-3,3e-3"
    require(axes or len(recipes) > 1 or seeds > 1, "settings", example, words or "no grid")
    arms = []
    for chosen, *values in itertools.product(recipes, *axes.values()):
        setting = dict(zip(axes, values, strict=True))
        first = load_recipe(chosen, [*common, *(f"{key}={x}" for key, x in setting.items())])
        if len(recipes) > 1:
            setting = {"recipe": Path(chosen).stem, **setting}
        parts = [f"{key.rpartition('.')[2]}={value}" for key, value in setting.items()]
        name = re.sub(r"[^\w.+=,-]+", "-", ",".join(parts) or Path(chosen).stem)[:120]
        runs = []
        for seed in range(first.seed, first.seed + seeds):
            place = str(folder / name / f"seed-{seed}")
            runs.append(first.model_copy(update={"seed": seed, "output_dir": place}))
        arms.append(Arm(name, setting, runs))
    require(len({arm.name for arm in arms}) == len(arms), "grid", "settings that differ", words)
    return arms


def is_finished(config: RunConfig) -> bool:
    """Return whether a run has finished.

    Raises:
        ValueError: the folder contains a run with different settings.
    """
    folder = Path(config.output_dir)
    if not folder.is_dir():
        return False
    saved = folder / "config.yaml"
    fits = saved.is_file() and load_recipe(str(saved)) == config
    expected = "an empty folder or a run of these settings (-o names another folder)"
    require(fits, "out", expected, folder)
    return (folder / "summary.json").is_file()


def compare(recipe: str, words: Sequence[str], seeds: int, folder: Path) -> list[Arm]:
    """Train all runs that have not finished, one by one. Write the table and the picture."""
    arms = plan_arms(recipe, words, seeds, folder)
    missing = [config for arm in arms for config in arm.runs if not is_finished(config)]
    for number, config in enumerate(missing, start=1):
        print(f"run {number} of {len(missing)}: {config.output_dir}", flush=True)
        shutil.rmtree(config.output_dir, ignore_errors=True)
        loop.train(config)
    rows = {arm.name: [curves.read_metrics(run.output_dir) for run in arm.runs] for arm in arms}
    report(rows, {arm.name: arm.values for arm in arms}, folder)
    return arms


def report(rows: dict[str, list[Rows]], settings: dict[str, dict[str, str]], folder: Path) -> None:
    """Write `table.md` and `compare.png` to a folder, and print the table.

    Args:
        rows: the metrics of all runs of each setting.
        settings: the values of each setting, by key of the grid.
        folder: where the files go. It is created if it does not exist.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "table.md").write_text(table(rows), encoding="utf-8")
    plot(rows, settings, folder / "compare.png")
    print(table(rows))
    print(folder / "compare.png")


# ------------------------------------------------------------------------------ table and picture
def cell(runs: list[Rows], metric: str) -> str:
    """Return the text for a metric in the table: the mean over the runs ± the standard error.

    The value of a run is the mean of the last tenth of its logged values. The text of an evaluation
    metric also shows the value before training: "before → after".
    """
    lines = [points for points in (series(rows, metric) for rows in runs) if points]
    if not lines:
        return "–"
    tails = [points[-max(1, len(points) // 10) :] for points in lines]
    last = with_error([sum(value for _, value in tail) / len(tail) for tail in tails])
    if metric.startswith("eval_") and all(points[0][0] == 0 for points in lines):
        first = with_error([points[0][1] for points in lines])
        return f"{first} → {last}"
    return last


def with_error(values: list[float]) -> str:
    """Format the mean of the values, followed by the standard error if there are several values."""
    mean, error = mean_and_error(values)
    return f"{mean:.4g}" if math.isnan(error) else f"{mean:.4g} ± {error:.2g}"


def table(rows: dict[str, list[Rows]]) -> str:
    """Return the table in Markdown.

    A metric is left out if it has no values, or if all its values are close to its neutral value.
    """
    shown = {metric: METRICS[metric][0] for metric in METRICS if is_telling(rows, metric)}
    lines = [" | ".join(["| setting", *shown.values(), "runs |"]), "|" + "---|" * (len(shown) + 2)]
    for name, runs in rows.items():
        cells = [cell(runs, metric) for metric in shown]
        lines.append(" | ".join([f"| {name}", *cells, f"{len(runs)} |"]))
    return "\n".join(lines) + "\n"


def is_telling(rows: dict[str, list[Rows]], metric: str) -> bool:
    """Return True if a metric has a value that differs from its neutral value (see NEUTRAL)."""
    neutral = NEUTRAL.get(metric, math.inf)
    points = (point for runs in rows.values() for run in runs for point in series(run, metric))
    return any(abs(value - neutral) > TELLING for _, value in points)


def plot(rows: dict[str, list[Rows]], settings: dict[str, dict[str, str]], path: Path) -> None:
    """Save the picture at `path`. It has one panel for each metric and each group of curves.

    A group takes several rows if it has more panels than COLUMNS. The last line of the picture
    names the processor.
    """
    groups = grouped(rows, settings)
    shown = [name for name, (_, title) in METRICS.items() if title and is_telling(rows, name)]
    columns = max(1, min(COLUMNS, len(shown)))
    height = max(1, math.ceil(len(shown) / columns)) * len(groups)
    keys = list(next(iter(settings.values())))
    with curves.picture(path, (4.2 * columns, 3.1 * height), (height, columns)) as (figure, grid):
        figure.supxlabel(measure.hardware("cpu")["cpu"], fontsize=9, color="gray")
        panels = grid.reshape(len(groups), -1)
        for row, (key, lines) in zip(panels, groups.items(), strict=True):
            for axes, metric in itertools.zip_longest(row, shown):
                if metric is None:
                    axes.set_visible(False)
                    continue
                draw(axes, lines, metric)
                title = METRICS[metric][1]
                axes.set(title=f"{title} by {key}" if key else title, xlabel="step")
            others = [name for name in keys if key and name != key]
            row[0].set_ylabel(f"mean ± SE over {', '.join(['seeds', *others])}")
            if len(lines) > 1:
                row[0].legend()


def grouped(
    rows: dict[str, list[Rows]], settings: dict[str, dict[str, str]]
) -> dict[str, dict[str, list[Rows]]]:
    """Group the runs into the curves of each row of panels.

    Returns:
        A dict with one entry for each row of panels. The entry "" has one curve for each setting.
        The entry of a key of the grid has one curve for each value of the key. A curve will show
        the mean of its runs.
    """
    keys = list(next(iter(settings.values())))
    groups = {}
    if len(keys) < 2 or len(settings) <= MOST_LINES:
        groups[""] = rows
    for key in keys if len(keys) > 1 else ():
        lines: dict[str, list[Rows]] = defaultdict(list)
        for name, values in settings.items():
            lines[values[key]] += rows[name]
        groups[key] = dict(lines)
    return groups


def draw(axes: Any, lines: dict[str, list[Rows]], metric: str) -> None:
    """Draw one curve for each label: the mean of its runs, with a band of one standard error."""
    for index, (label, runs) in enumerate(lines.items()):
        middle, low, high = band([series(rows, metric) for rows in runs], metric)
        if not middle:
            continue
        steps, values = zip(*middle, strict=True)
        dash = "-" if index < curves.COLORS else "--"
        axes.plot(steps, values, dash, color=f"C{index}", label=label)
        axes.fill_between(steps, low, high, color=f"C{index}", alpha=0.18, linewidth=0)
    if metric == "grad_variance":
        axes.set_yscale("log")
        top = axes.get_ylim()[1]
        axes.set_ylim(max(axes.get_ylim()[0], SMALLEST * top), top)


def band(runs: list[Series], metric: str) -> tuple[Series, list[float], list[float]]:
    """Return the mean over the runs at each step, and the ends of a band of one standard error."""
    at = defaultdict(list)
    for points in runs:
        for step, value in points if metric.startswith("eval_") else curves.smooth(points):
            at[step].append(value)
    middle, low, high = [], [], []
    for step in sorted(at):
        mean, error = mean_and_error(at[step])
        error = 0.0 if math.isnan(error) else error
        middle.append((step, mean))
        low.append(mean - error)
        high.append(mean + error)
    return middle, low, high


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("recipe")
    parser.add_argument("settings", nargs="*", metavar="KEY=A,B")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("-o", "--out", type=Path)
    options = parser.parse_intermixed_args()
    stems = "-".join(Path(name).stem for name in options.recipe.split(","))
    folder = options.out or Path("runs") / f"compare-{stems}"
    try:
        compare(options.recipe, options.settings, options.seeds, folder)
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
