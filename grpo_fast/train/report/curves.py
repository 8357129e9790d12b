"""Plots of the metrics of one or more runs, with a panel for each group of metrics."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from pydantic import ConfigDict, TypeAdapter, ValidationError

from grpo_fast.errors import argument_error, escape_control, require
from grpo_fast.train.folder import written

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Rows = list[dict[str, float | None]]  # rows of a metrics.jsonl
ROW = TypeAdapter(dict[str, float | None], config=ConfigDict(strict=True))
Series = list[tuple[float, float]]  # pairs of step and value


# Maps the title of each panel to its metrics, and each metric to its label. The first metric of a
# panel is drawn as a solid line, and the second metric as a dashed line.
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
ALWAYS = ("Reward", "Accuracy on held-out prompts")  # panels drawn even if the values are constant
STYLE = Path(__file__).with_name("pictures.mplstyle")  # defines the colors C0 to C7
INK = "#3b4252"


def read_metrics(run: str | Path) -> Rows:
    """Read the rows of a metrics.jsonl file. An incomplete last line is ignored.

    Args:
        run: folder of a run, or path of the file.

    Raises:
        ValueError: the file does not exist, or a line is not a JSON object of numbers.
    """
    path = Path(run)
    path = path / "metrics.jsonl" if path.is_dir() else path
    expected = "a run's folder or its metrics.jsonl"
    require(path.is_file(), "run", expected, f"{path}, which does not exist")
    lines = path.read_bytes().split(b"\n")
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            rows.append(ROW.validate_json(line))
        except ValidationError:
            if number == len(lines):  # empty, or cut while it was written
                break
            expected = "a JSON object, whose values are numbers or null"
            raise argument_error(f"{path}:{number}", expected, repr(line[:40])) from None
    return rows


def series(rows: Rows, metric: str) -> Series:
    """Return the pairs (step, value) of a metric. Rows without step or finite value are skipped."""
    points = []
    for row in rows:
        step = row.get("step")
        value = row.get(metric)
        if step is not None and value is not None and math.isfinite(value):
            points.append((step, value))
    return points


def smooth(points: Series) -> Series:
    """Smooth a series with a centered moving average over a twentieth of its points."""
    half = max(1, len(points) // 40)
    smoothed = []
    for index, (step, first) in enumerate(points):
        # Near the ends of the series, use a smaller window on both sides. A one-sided window would
        # shift the average of a rising or falling series.
        reach = min(half, index, len(points) - 1 - index)
        window = points[index - reach : index + reach + 1]
        # Average the differences from one value, so that a constant series stays constant.
        smoothed.append((step, first + fmean(value - first for _, value in window)))
    return smoothed


def plot_runs(runs: Sequence[str | Path], out: str | Path | None = None) -> Path:
    """Plot the metrics of one or more runs in one picture.

    Args:
        runs: folders of runs, or paths of their metrics.jsonl.
        out: path of the picture. If it is None, curves.png is written to the folder of a single
            run, or to the current folder if there are several runs.

    Returns:
        The path of the picture.

    Raises:
        ValueError: the runs have logged no metric of PANELS, or `out` is a folder, has no suffix,
            or has the suffix .pgf.
    """
    from matplotlib.lines import Line2D

    if out is None:
        first = Path(runs[0])
        folder = first if first.is_dir() else first.parent
        out = folder / "curves.png" if len(runs) == 1 else "curves.png"
    path = Path(out)
    # Without a suffix, matplotlib would append one and write to a different path. The format .pgf
    # is excluded because it needs LaTeX.
    fits = not path.is_dir() and path.suffix not in ("", ".pgf")
    require(fits, "out", "a file such as curves.png", repr(str(out)))
    logged = [read_metrics(run) for run in runs]
    titles = [title for title in PANELS if is_drawn(title, logged)]
    require(titles, "runs", "metrics to draw", f"none in {', '.join(map(str, runs))}")
    columns = min(4, len(titles))
    lines = math.ceil(len(titles) / columns)
    with picture(path, (3.6 * columns, 2.7 * lines + 0.4), (lines, columns)) as (figure, grid):
        for axes, title in itertools.zip_longest(grid.flat, titles):
            if title is None:
                axes.set_visible(False)
            else:
                _draw(axes, title, logged)
        names = [escape_control(str(run)) for run in runs]
        if len(runs) > 1:
            handles = [Line2D([], [], c=f"C{i}", lw=2) for i in range(len(runs))]
            figure.legend(handles, names, loc="outside lower center", ncols=2, fontsize=9)
        else:
            figure.suptitle(names[0], color=INK)
    return path


def is_drawn(title: str, logged: Sequence[Rows]) -> bool:
    """Return True if the panel of this title must be drawn.

    A run must have logged one of the panel's metrics. Unless the panel is in ALWAYS, one of the
    metrics must also change.
    """
    lines = [series(rows, metric) for rows in logged for metric in PANELS[title]]
    changes = any(len({value for _, value in points}) > 1 for points in lines)
    return any(lines) and (changes or title in ALWAYS)


@contextmanager
def picture(
    path: Path, size: tuple[float, float], grid: tuple[int, int], **options: Any
) -> Iterator[tuple[Any, Any]]:
    """Yield an empty figure and its axes, and write the figure to a file at the end of the context.

    The same drawing always gives a file with the same bytes.

    Args:
        path: path of the picture.
        size: width and height in inches.
        grid: number of rows and number of columns of axes.
        **options: further arguments of `Figure.subplots`.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure  # pyplot could need a display

    with rc_context(fname=STYLE):
        figure = Figure(figsize=size)
        yield figure, figure.subplots(*grid, squeeze=False, **options)
        with written(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(path, metadata={"Software": None} if path.suffix == ".png" else None)


def _draw(axes: Axes, title: str, logged: Sequence[Rows]) -> None:
    """Draw one panel. Each run has a color. If there is only one run, each metric has a color."""
    for index, (metric, label) in enumerate(PANELS[title].items()):
        for run, rows in enumerate(logged):
            points = series(rows, metric)
            if points:
                number = run if len(logged) > 1 else index
                style = {"color": f"C{number}", "linestyle": "--" if index else "-"}
                _line(axes, points, dict(series(rows, metric + "_se")), metric, style)
        axes.plot([], [], label=label, color=INK, linestyle="--" if index else "-")
    if len(PANELS[title]) > 1:
        axes.legend()
    axes.set(title=title, xlabel="step")


def _line(
    axes: Axes, points: Series, errors: dict[float, float], metric: str, style: dict[str, Any]
) -> None:
    """Draw one metric of one run.

    An evaluation metric becomes points with error bars. Any other metric becomes a pale line of
    the values and a line of the smoothed values.
    """
    steps, values = zip(*points, strict=True)
    if metric.startswith("eval_"):
        bars = [max(0.0, errors.get(step, 0.0)) for step in steps]
        axes.errorbar(steps, values, yerr=bars, fmt="o", markersize=3.5, capsize=2, **style)
        return
    axes.plot(steps, values, color=style["color"], alpha=0.25, linewidth=0.9)
    axes.plot(*zip(*smooth(points), strict=True), **style)
