"""The picture of one or several runs: small multiples, the raw series behind a smoothed one."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Series = list[tuple[float, float]]


class Panel(NamedTuple):
    """One small plot: its title and the metrics in it, first one solid, the second dashed."""

    title: str
    metrics: tuple[tuple[str, str], ...]  # (metric name, label)


PANELS = (
    Panel("Reward", (("reward", "train"), ("eval_reward", "held out"))),
    Panel(
        "Accuracy on held-out prompts",
        (("eval_accuracy_strict", "strict"), ("eval_accuracy_lenient", "lenient")),
    ),
    Panel("Completion length (tokens)", (("completions/mean_length", "mean"),)),
    Panel("KL to the reference", (("kl", "kl"),)),
    Panel("Entropy (nats)", (("entropy", "entropy"),)),
    Panel("Clip fraction", (("clip_ratio/region_mean", "clipped"),)),
    Panel(
        "Throughput (tokens/s)", (("perf/rollout_tok_s", "rollout"), ("perf/train_tok_s", "train"))
    ),
    Panel("Gradient norm", (("grad_norm", "grad norm"),)),
)
COLORS = ("#2f6fb4", "#d1603d", "#3a8f5c", "#8a5aa8", "#b8892b", "#4aa3a3", "#c2527d", "#5f6b7a")
INK, GRID = "#3b4252", "#e3e6eb"


def read_metrics(run: str | Path) -> list[dict[str, float | None]]:
    """The lines of a run's metrics.jsonl (`run`: its folder or the file), but not a cut last one.

    Raises ValueError for no such file, or (with file:line) a line that is no JSON object.
    """
    path = Path(run)
    path = path / "metrics.jsonl" if os.path.isdir(path) else path
    if not os.path.isfile(path):
        raise ValueError(
            f"run: expected a run's folder or its metrics.jsonl, found no file at {path}"
        )
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start})") from None
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line, parse_int=float)  # an int may be too large for one
        except (json.JSONDecodeError, RecursionError):
            if number == len(lines):
                break
            raise ValueError(f"{path}:{number}: not a JSON object") from None
        if not isinstance(row, dict):
            raise ValueError(f"{path}:{number}: expected a JSON object, got {type(row).__name__}")
        rows.append(row)
    return rows


def series(rows: Sequence[dict[str, float | None]], metric: str) -> Series:
    """(step, value) of one metric, where it was logged and finite."""
    found = []
    for index, row in enumerate(rows):
        value, step = row.get(metric), row.get("step", index)
        numbers = isinstance(value, (int, float)) and isinstance(step, (int, float))
        if numbers and math.isfinite(value) and math.isfinite(step):
            found.append((float(step), float(value)))
    return found


def smooth(points: Series) -> Series:
    """Mean over a centred window of about a twentieth of the run, shorter at the ends."""
    values = [value for _, value in points]
    half = max(1, len(points) // 40)
    smoothed = []
    for index, (step, _) in enumerate(points):
        reach = min(half, index, len(points) - 1 - index)
        window = values[index - reach : index + reach + 1]
        smoothed.append((step, math.fsum(window) / len(window)))
    return smoothed


def plot_runs(runs: Sequence[str | Path], out: str | Path) -> Path:
    """Draw the runs' curves into one picture and return its path, without empty panels.

    Raises ValueError when a run has no readable metrics, or none of the metrics drawn here, and for
    an `out` that is no file's name with an ending.
    """
    from matplotlib.figure import Figure  # no pyplot: no global state, no display

    path = Path(out)
    if path.is_dir() or not path.suffix:  # matplotlib would write to another name than this one
        raise ValueError(f"out: expected a file such as curves.png, got {str(out)!r}")
    if not runs:
        raise ValueError("runs: expected at least one run's folder, got none")
    logged = {label: read_metrics(run) for label, run in zip(_labels(runs), runs, strict=True)}
    panels = [
        p
        for p in PANELS
        if any(series(rows, name) for rows in logged.values() for name, _ in p.metrics)
    ]
    if not panels:
        raise ValueError(f"runs: found no metrics to draw in {', '.join(map(str, runs))}")
    columns = min(4, len(panels)) if len(panels) != 5 else 3
    lines = math.ceil(len(panels) / columns)
    figure = Figure(
        figsize=(3.6 * columns, 2.7 * lines + (0.4 if len(runs) > 1 else 0.0)), layout="constrained"
    )
    grid = figure.subplots(lines, columns, squeeze=False).flatten()
    for axes, panel in zip(grid, panels, strict=False):
        _draw(axes, panel, logged)
    for axes in grid[len(panels) :]:
        axes.set_visible(False)
    if len(runs) > 1:
        _run_legend(figure, list(logged))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(
        path,
        dpi=150,
        facecolor="white",
        metadata={"Software": None} if path.suffix == ".png" else None,
    )
    return path


def _labels(runs: Sequence[str | Path]) -> list[str]:
    """The folders' names; where two are the same, the paths."""
    paths = [Path(run).resolve() for run in runs]
    names = [p.parent.name if p.name == "metrics.jsonl" else p.name for p in paths]
    return (
        names
        if len(set(names)) == len(names)
        else [f"{i}: {run}" for i, run in enumerate(runs, start=1)]
    )


def _draw(axes: Axes, panel: Panel, logged: dict[str, list[dict[str, float | None]]]) -> None:
    from matplotlib.lines import Line2D

    several = len(logged) > 1
    keys = []
    for index, (metric, label) in enumerate(panel.metrics):
        dash = "--" if several and index else "-"
        curves = [(run, rows) for run, rows in enumerate(logged.values()) if series(rows, metric)]
        for run, rows in curves:
            color = COLORS[(run if several else index) % len(COLORS)]
            errors = series(rows, metric + "_se")
            _line(
                axes,
                series(rows, metric),
                errors,
                color,
                dash,
                evaluation=metric.startswith("eval_"),
            )
        if curves:  # a colour stands for a run where there are several, else for a metric
            keys.append(
                Line2D([], [], color=INK if several else color, linestyle=dash, label=label)
            )
    if len(keys) > 1:
        axes.legend(handles=keys, frameon=False, fontsize=8, labelcolor=INK)
    axes.set_title(panel.title, fontsize=10, loc="left", color=INK)
    axes.grid(True, color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(GRID)
    axes.tick_params(labelsize=8, colors=INK, length=0)
    axes.set_xlabel("step", fontsize=8, color=INK)
    axes.margins(x=0.02)


def _line(
    axes: Axes, points: Series, errors: Series, color: str, dash: str, *, evaluation: bool
) -> None:
    """Evaluations: points with error bars. Training: the raw series behind the smoothed one."""
    steps, values = zip(*points, strict=True)
    if evaluation:
        known = dict(errors)
        bars = [known.get(step, 0.0) for step in steps]
        axes.errorbar(
            steps,
            values,
            yerr=bars,
            color=color,
            linestyle=dash,
            marker="o",
            markersize=3.5,
            linewidth=1.4,
            capsize=2,
        )
        return
    axes.plot(steps, values, color=color, alpha=0.25, linewidth=0.9)
    _, means = zip(*smooth(points), strict=True)
    axes.plot(steps, means, color=color, linestyle=dash, linewidth=1.7)


def _run_legend(figure: Figure, labels: list[str]) -> None:
    from matplotlib.lines import Line2D

    handles = [
        Line2D([], [], color=COLORS[i % len(COLORS)], linewidth=2) for i in range(len(labels))
    ]
    style = {"frameon": False, "fontsize": 9, "labelcolor": INK}
    figure.legend(handles, labels, loc="outside lower center", ncols=min(4, len(labels)), **style)
