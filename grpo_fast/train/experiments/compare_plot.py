"""The picture of a comparison: a row of panels for all settings, and one for each key of the grid.

A line is the mean over the runs of a setting (in a key's row also over the other keys' settings),
its band one standard error.
"""

from __future__ import annotations

import math
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

from grpo_fast.train.evaluation.evaluate import mean_and_error
from grpo_fast.train.report.curves import COLORS, Rows, Series, picture, series, smooth

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PANELS = {
    "Reward": "reward",
    "Loss": "loss",
    "Accuracy on held-out prompts": "eval_accuracy_strict",
    "Variance of the gradient": "grad_variance",
    "KL to the reference": "kl",
    "Trainer's probability over sampler's": "sampling/importance_sampling_ratio/mean",
}
NEUTRAL = {"sampling/importance_sampling_ratio/mean": 1.0}  # metric → the value that says nothing
TELLING = 0.01  # what is farther from there says something
MOST_LINES = 8  # in one panel
SMALLEST = 1e-4  # of a panel's largest value, on a logarithmic scale: a run that stands still has 0


def plot(rows: dict[str, list[Rows]], settings: dict[str, dict[str, str]], path: Path) -> Path:
    """Draw a comparison, without the panels in which no value is telling.

    Args:
        rows: name of a setting → metrics of each of its runs.
        settings: the same name → keys of the grid with their values.
    """
    groups = grouped(rows, settings)
    everything = [run for runs in rows.values() for run in runs]
    titles = [t for t, name in PANELS.items() if is_telling(everything, name)]
    width = max(1, len(titles))
    size = 4.2 * width, 3.1 * len(groups)
    with picture(path, size, (len(groups), width)) as (_, panels):
        for row, (key, lines) in zip(panels, groups.items(), strict=True):
            for axes, title in zip(row, titles, strict=False):
                draw(axes, lines, PANELS[title])
                axes.set(title=f"{title} by {key}" if key else title, xlabel="step")
            row[0].set_ylabel(band_words(key, list(settings.values())))
            if len(lines) > 1:
                row[0].legend()
    return path


def band_words(key: str, settings: list[dict[str, str]]) -> str:
    """The label of a row: `mean ± SE over seeds, optim.lr`, the keys that it averages over."""
    others = [name for name in (settings[0] if key else ()) if name != key]
    return f"mean ± SE over seeds{''.join(f', {name}' for name in others)}"


def is_telling(runs: list[Rows], metric: str) -> bool:
    """Whether any run has a value of it; of a metric in NEUTRAL, one that is not neutral."""
    neutral = NEUTRAL.get(metric, math.inf)
    return any(abs(value - neutral) > TELLING for run in runs for _, value in series(run, metric))


def grouped(
    rows: dict[str, list[Rows]], settings: dict[str, dict[str, str]]
) -> dict[str, dict[str, list[Rows]]]:
    """Row of panels (a key, "" for all settings) → label of a line → its runs."""
    keys = list(next(iter(settings.values())))
    groups: dict[str, dict[str, list[Rows]]] = {}
    if len(keys) < 2 or len(settings) <= MOST_LINES:
        groups[""] = dict(rows)
    for key in keys if len(keys) > 1 else ():
        lines: dict[str, list[Rows]] = defaultdict(list)
        for name, values in settings.items():
            lines[values[key]] += rows[name]
        groups[key] = dict(lines)
    return groups


def draw(axes: Axes, lines: dict[str, list[Rows]], metric: str) -> None:
    for index, (label, runs) in enumerate(lines.items()):
        middle, low, high = band([series(rows, metric) for rows in runs], metric)
        if not middle:
            continue
        steps, values = zip(*middle, strict=True)
        dash = "-" if index < COLORS else "--"
        axes.plot(steps, values, dash, color=f"C{index}", label=label)
        axes.fill_between(steps, low, high, color=f"C{index}", alpha=0.18, linewidth=0)
    if metric == "grad_variance":
        axes.set_yscale("log")
        top = axes.get_ylim()[1]
        axes.set_ylim(max(axes.get_ylim()[0], SMALLEST * top), top)


def band(runs: list[Series], metric: str) -> tuple[Series, list[float], list[float]]:
    """Mean over the runs at each step that any of them logged, and mean ∓ one standard error."""
    at: dict[float, list[float]] = defaultdict(list)
    for points in runs:
        for step, value in points if metric.startswith("eval_") else smooth(points):
            at[step].append(value)
    middle, low, high = [], [], []
    for step in sorted(at):
        mean, error = mean_and_error(at[step])
        error = 0.0 if math.isnan(error) else error
        middle.append((step, mean))
        low.append(mean - error)
        high.append(mean + error)
    return middle, low, high
