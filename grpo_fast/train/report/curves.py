"""Curves of one or several runs, with one panel for each metric that was logged and changes."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_fast.data import escape_control
from grpo_fast.errors import require

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Rows = list[dict[str, float | None]]  # rows of a metrics.jsonl
Series = list[tuple[float, float]]  # pairs of step and value


# Panels by title. Each panel maps its metrics to labels. The first metric is drawn solid, the
# second dashed.
PANELS: dict[str, dict[str, str]] = {
    "Reward": {"reward": "train", "eval_reward": "held out"},
    "Accuracy on held-out prompts": {
        "eval_accuracy_strict": "strict", "eval_accuracy_lenient": "lenient",
    },
    "Loss": {"loss": "loss"},
    "KL to the reference": {"kl": "kl"},
    "Value error": {"value/error": "value error"},
    "Completion length (tokens)": {"completions/mean_length": "mean"},
    "Entropy (nats)": {"entropy": "entropy"},
    "Clip fraction (usual: 0.1 to 0.3)": {"clip_ratio/region_mean": "clipped"},
    "Throughput (tokens/s)": {"perf/rollout_tok_s": "rollout", "perf/train_tok_s": "train"},
    "Gradient norm": {"grad_norm": "grad norm"},
}  # fmt: skip
ALWAYS = ("Reward", "Accuracy on held-out prompts")  # drawn even if they never change
STYLE = Path(__file__).with_name("pictures.mplstyle")  # colors C0 to C7
INK = "#3b4252"
GRID = "#e3e6eb"
COLORS = 8
LARGEST = 1e300  # larger values would overflow matplotlib's margins
SMOOTHED = 2000  # points of a smoothed series; more than a picture has columns


def read_metrics(run: str | Path) -> Rows:
    """Read the rows of a metrics.jsonl. An incomplete last line is ignored.

    Args:
        run: folder of a run, or path of the file.

    Raises:
        ValueError: the file does not exist, or a line is not a JSON object.
    """
    path = Path(run)
    path = path / "metrics.jsonl" if os.path.isdir(path) else path
    if not os.path.isfile(path):
        expected = "expected a run's folder or its metrics.jsonl"
        raise ValueError(f"run: {expected}, found no file at {path}")
    try:
        lines = path.read_text(encoding="utf-8").removesuffix("\n").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start})") from None
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line, parse_int=float)  # an int may be too large for a float
        except (json.JSONDecodeError, RecursionError):
            if number == len(lines):
                break
            row = None
        require(isinstance(row, dict), f"{path}:{number}", "a JSON object", repr(line[:40]))
        rows.append(row)
    return rows


def series(rows: Rows, metric: str) -> Series:
    """Return pairs of step and value of a metric, from the rows that contain a number for it."""
    points = []
    for index, row in enumerate(rows):
        value = row.get(metric)
        step = row.get("step", index)
        numbers = isinstance(value, (int, float)) and isinstance(step, (int, float))
        if numbers and abs(value) < LARGEST and abs(step) < LARGEST:
            points.append((float(step), float(value)))
    return points


def smooth(points: Series) -> Series:
    """Smooth a series with a centered moving average over a twentieth of the run.

    The result has at most about SMOOTHED points.
    """
    values = [value for _, value in points]
    half = max(1, len(points) // 40)
    smoothed = []
    for index in range(0, len(points), 1 + len(points) // SMOOTHED):
        # Shrink the window symmetrically at both ends. A one-sided window would shift a slope.
        reach = min(half, index, len(points) - 1 - index)
        window = values[index - reach : index + reach + 1]
        smoothed.append((points[index][0], math.fsum(window) / len(window)))
    return smoothed


def plot_runs(runs: Sequence[str | Path], out: str | Path | None = None) -> Path:
    """Draw the curves of runs into one picture.

    Args:
        runs: folders of runs, or paths of their metrics.jsonl.
        out: path of the picture. None writes curves.png into the folder of a single run, or into
            the current folder if there are several runs.

    Returns:
        The path of the picture.

    Raises:
        ValueError: the runs have no metrics to draw, or `out` is not the name of a picture.
    """
    from matplotlib.lines import Line2D

    require(runs, "runs", "at least one run's folder", "none")
    if out is None:
        first = Path(runs[0])
        folder = first if first.is_dir() else first.parent
        out = folder / "curves.png" if len(runs) == 1 else "curves.png"
    path = picture_path(out)
    logged = dict(zip(_labels(runs), map(read_metrics, runs), strict=True))
    titles = [title for title in PANELS if is_drawn(title, list(logged.values()))]
    require(titles, "runs", "metrics to draw", f"none in {', '.join(map(str, runs))}")
    columns = 3 if len(titles) in (5, 6, 9) else min(4, len(titles))
    lines = math.ceil(len(titles) / columns)
    with picture(path, (3.6 * columns, 2.7 * lines + 0.4), (lines, columns)) as (figure, grid):
        for axes, title in zip(grid.flat, titles, strict=False):
            _draw(axes, title, list(logged.values()))
        for axes in grid.flat[len(titles) :]:
            axes.set_visible(False)
        handles = [Line2D([], [], c=f"C{i}", lw=2, label=name) for i, name in enumerate(logged)]
        if len(handles) > 1:
            figure.legend(handles=handles, loc="outside lower center", ncols=2, fontsize=9)
        else:
            figure.suptitle(next(iter(logged)), color=INK)
    return path


def is_drawn(title: str, logged: Sequence[Rows]) -> bool:
    """Return True if a panel is drawn.

    A panel is drawn if one of its lines changes, if all lines have fewer than three points, or if
    it is in ALWAYS. A panel without any points is never drawn.
    """
    lines = [series(rows, metric) for rows in logged for metric in PANELS[title]]
    changes = any(len({value for _, value in points}) > 1 for points in lines)
    is_short = max(map(len, lines)) < 3
    return any(lines) and (changes or is_short or title in ALWAYS)


def picture_path(out: str | Path) -> Path:
    """Return the path of a picture.

    Raises:
        ValueError: the path is a folder, has no suffix, or has the suffix .pgf.
    """
    path = Path(out)
    # Without a suffix matplotlib would append one and write to a different path. Format .pgf needs
    # LaTeX.
    fits = not path.is_dir() and path.suffix not in ("", ".pgf")
    require(fits, "out", "a file such as curves.png", repr(str(out)))
    return path


@contextmanager
def picture(
    path: Path, size: tuple[float, float], grid: tuple[int, int], **options: Any
) -> Iterator[tuple[Any, Any]]:
    """Yield a figure in the common style and its axes, then write the figure to a file.

    Identical figures produce identical bytes.

    Args:
        path: path of the picture.
        size: width and height in inches.
        grid: numbers of rows and columns of the axes.
        **options: further arguments of `Figure.subplots`.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure  # pyplot would need a display

    with rc_context(fname=STYLE):
        figure = Figure(figsize=size)
        yield figure, figure.subplots(*grid, squeeze=False, **options)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, metadata={"Software": None} if path.suffix == ".png" else None)


def _labels(runs: Sequence[str | Path]) -> list[str]:
    """Return the folder names of the runs. If two are equal, return numbered paths instead."""
    paths = [Path(run).resolve() for run in runs]
    names = [escape_control(p.parent.name if p.name == "metrics.jsonl" else p.name) for p in paths]
    if len(set(names)) < len(names):
        names = [f"{i}: {escape_control(str(run))}" for i, run in enumerate(runs, start=1)]
    return names


def _draw(axes: Axes, title: str, logged: Sequence[Rows]) -> None:
    """Draw one panel. Each run has a color, or each metric if there is only one run."""
    from matplotlib.lines import Line2D

    keys = []
    for index, (metric, label) in enumerate(PANELS[title].items()):
        dash = "--" if index else "-"
        lines = [series(rows, metric) for rows in logged]
        for run, rows in enumerate(logged):
            if lines[run]:
                color = f"C{run if len(logged) > 1 else index}"
                errors = dict(series(rows, metric + "_se"))
                _line(axes, lines[run], errors, metric, color=color, linestyle=dash)
        if any(lines):
            color = INK if len(logged) > 1 else f"C{index}"
            keys.append(Line2D([], [], label=label, color=color, linestyle=dash))
    if len(keys) > 1:
        axes.legend(handles=keys)
    axes.set(title=title, xlabel="step")


def _line(
    axes: Axes, points: Series, errors: dict[float, float], metric: str, **style: Any
) -> None:
    """Draw evaluation metrics as points with error bars, and other metrics raw and smoothed."""
    steps, values = zip(*points, strict=True)
    if metric.startswith("eval_"):
        bars = [max(0.0, errors.get(step, 0.0)) for step in steps]
        axes.errorbar(
            steps, values, yerr=bars, marker="o", markersize=3.5, linewidth=1.4, capsize=2, **style
        )
        return
    axes.plot(steps, values, color=style["color"], alpha=0.25, linewidth=0.9)
    axes.plot(*zip(*smooth(points), strict=True), **style)
