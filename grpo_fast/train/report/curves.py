"""The picture of one or several runs: small multiples, the raw series behind a smoothed one."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_fast.data import escape_control
from grpo_fast.errors import require
from grpo_fast.train.config.plain import read_yaml_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Rows = list[dict[str, float | None]]  # of a metrics.jsonl
Series = list[tuple[float, float]]


# One small plot each: title → metrics with their labels, the first one solid, the second dashed.
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
ALWAYS = ("Reward", "Accuracy on held-out prompts")  # also where they never move
STYLE = Path(__file__).with_name("pictures.mplstyle")  # its colours are C0 to C7, and C8 is C0
INK, GRID, COLORS = "#3b4252", "#e3e6eb", 8
LARGEST = 1e300  # axes: differences and margins of what they show are finite
SMOOTHED = 2000  # points of a smoothed series, at most about: more than a picture has columns

MOST_SETTINGS = 3  # of those that differ
LONGEST_VALUE = 30  # characters of a value
OWN = ("output_dir", "log", "resume")  # they differ from run to run and explain nothing


def read_metrics(run: str | Path) -> Rows:
    """The lines of a run's metrics.jsonl (`run`: its folder or the file), but not a cut last one;
    ValueError for no such file, or (with file:line) a line that is no JSON object.
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
            row = json.loads(line, parse_int=float)  # an int may be too large for one
        except (json.JSONDecodeError, RecursionError):
            if number == len(lines):
                break
            raise ValueError(f"{path}:{number}: not a JSON object") from None
        if not isinstance(row, dict):
            raise ValueError(f"{path}:{number}: expected a JSON object, got {type(row).__name__}")
        rows.append(row)
    return rows


def series(rows: Rows, metric: str) -> Series:
    """(step, value) of one metric, of the rows of steps that have it as a number for an axis."""
    points = []
    for index, row in enumerate(rows):
        if "update" in row:  # one of several in a step, which has a row of its own
            continue
        value, step = row.get(metric), row.get("step", index)
        numbers = isinstance(value, (int, float)) and isinstance(step, (int, float))
        if numbers and abs(value) < LARGEST and abs(step) < LARGEST:
            points.append((float(step), float(value)))
    return points


def smooth(points: Series) -> Series:
    """Mean over a centred window of a twentieth of the run; of a long series every n-th one."""
    values = [value for _, value in points]
    half = max(1, len(points) // 40)
    smoothed = []
    for index in range(0, len(points), 1 + len(points) // SMOOTHED):
        # Narrower at both ends, on both sides: half a window would lag behind a slope.
        reach = min(half, index, len(points) - 1 - index)
        window = values[index - reach : index + reach + 1]
        smoothed.append((points[index][0], math.fsum(window) / len(window)))
    return smoothed


def plot_runs(runs: Sequence[str | Path], out: str | Path) -> Path:
    """Draw the runs' curves into one picture and return its path, without empty panels.

    Raises ValueError for runs without metrics that are drawn here, and for an impossible `out`.
    """
    from matplotlib.lines import Line2D

    path = picture_path(out)
    require(runs, "runs", "at least one run's folder", "none")
    logged = {label: read_metrics(run) for label, run in zip(_labels(runs), runs, strict=True)}
    titles = [
        title
        for title, metrics in PANELS.items()
        if tells(title, [series(rows, name) for rows in logged.values() for name in metrics])
    ]
    if not titles:
        raise ValueError(f"runs: found no metrics to draw in {', '.join(map(str, runs))}")
    columns = 3 if len(titles) in (5, 6, 9) else min(4, len(titles))
    lines = math.ceil(len(titles) / columns)
    size = 3.6 * columns, 2.7 * lines + (0.4 if len(runs) > 1 else 0.0)
    settings = [settings_of(run) for run in runs]
    with picture(path, size, (lines, columns)) as (figure, grid):
        for axes, title in zip(grid.flat, titles, strict=False):
            _draw(axes, title, list(logged.values()))
            if title == "Loss" and any(each.get("loss.entropy_coef") for each in settings):
                axes.set_title("Loss, entropy bonus included")
        for axes in grid.flat[len(titles) :]:
            axes.set_visible(False)
        if len(runs) == 1:
            figure.suptitle(title_of(next(iter(logged)), settings[0]), color=INK)
        else:
            handles = [
                Line2D([], [], c=f"C{i}", lw=2, label=f"{label}  {said}".rstrip())
                for i, (label, said) in enumerate(zip(logged, differing(settings), strict=True))
            ]
            place = {"loc": "outside lower center", "ncols": min(2, len(logged)), "fontsize": 9}
            figure.legend(handles=handles, **place)
    return path


def tells(title: str, lines: list[Series]) -> bool:
    """Whether a panel is drawn: one of its lines moves or is short, or it is one of ALWAYS."""
    moves = any(len({value for _, value in points}) > 1 for points in lines)
    short = max(map(len, lines)) < 3
    return any(lines) and (moves or short or title in ALWAYS)


def usual_picture(runs: Sequence[str]) -> Path:
    """curves.png in the folder of a single run; of several runs, here."""
    path = Path(runs[0])
    folder = path if path.is_dir() else path.parent
    return folder / "curves.png" if len(runs) == 1 else Path("curves.png")


def picture_path(out: str | Path) -> Path:
    """The file that a picture goes to. Raises ValueError for one that matplotlib cannot name."""
    path = Path(out)
    # Without a suffix matplotlib would write to another name than this one; .pgf needs LaTeX.
    fits = not path.is_dir() and path.suffix not in ("", ".pgf")
    require(fits, "out", "a file such as curves.png", repr(str(out)))
    return path


@contextmanager
def picture(
    path: Path, size: tuple[float, float], grid: tuple[int, int], **options: Any
) -> Iterator[tuple[Any, Any]]:
    """A figure in the style of them all, with its axes (lines, columns), which is written at the
    end: the same bytes for the same figure.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure  # no pyplot: no display

    with rc_context(fname=STYLE):
        figure = Figure(figsize=size)
        yield figure, figure.subplots(*grid, squeeze=False, **options)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, metadata={"Software": None} if path.suffix == ".png" else None)


def _labels(runs: Sequence[str | Path]) -> list[str]:
    paths = [Path(run).resolve() for run in runs]
    names = [p.parent.name if p.name == "metrics.jsonl" else p.name for p in paths]
    if len(set(map(escape_control, names))) != len(names):
        names = [f"{i}: {run}" for i, run in enumerate(runs, start=1)]
    return [escape_control(name) for name in names]


def _draw(axes: Axes, title: str, logged: list[Rows]) -> None:
    """One panel; metrics with the same lines share one and its label: `strict = lenient`."""
    from matplotlib.lines import Line2D

    several, same = len(logged) > 1, dict[str, tuple[str, list[str]]]()
    for metric, label in PANELS[title].items():
        lines = [series(rows, metric) for rows in logged]
        if any(lines):
            same.setdefault(repr(lines), (metric, []))[1].append(label)
    keys = []
    for index, (metric, labels) in enumerate(same.values()):
        style = {"linestyle": "--" if several and index else "-"}
        for run, rows in enumerate(logged):
            # A colour stands for a run where there are several, else for a metric.
            style["color"] = f"C{run if several else index}"
            _line(axes, rows, metric, {**style})
        style |= {"color": INK} if several else {}
        keys.append(Line2D([], [], label=" = ".join(labels), **style))  # type: ignore[arg-type]
    if len(keys) > 1 or any(" = " in str(key.get_label()) for key in keys):
        axes.legend(handles=keys)
    axes.set(title=title, xlabel="step")


def _line(axes: Axes, rows: Rows, metric: str, style: dict[str, Any]) -> None:
    """Evaluations: points with error bars. Training: the raw series behind the smoothed one."""
    points = series(rows, metric)
    if not points:
        return
    steps, values = zip(*points, strict=True)
    if metric.startswith("eval_"):
        errors = dict(series(rows, metric + "_se"))
        bars = [max(0.0, errors.get(step, 0.0)) for step in steps]
        style |= {"marker": "o", "markersize": 3.5, "linewidth": 1.4, "capsize": 2}
        axes.errorbar(steps, values, yerr=bars, **style)
        return
    axes.plot(steps, values, color=style["color"], alpha=0.25, linewidth=0.9)
    axes.plot(*zip(*smooth(points), strict=True), **style)


def settings_of(run: str | Path) -> dict[str, Any]:
    """Dotted key → value of the run's config.yaml; empty without a readable one."""
    folder = Path(run) if Path(run).is_dir() else Path(run).parent
    try:
        settings = read_yaml_file(folder / "config.yaml", "config.yaml")
    except (OSError, ValueError):
        return {}
    return flat(settings) if isinstance(settings, dict) else {}


def flat(settings: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    flattened: dict[str, Any] = {}
    for key, value in settings.items():
        name = f"{above}{key}"
        flattened |= flat(value, f"{name}.") if isinstance(value, Mapping) else {name: value}
    return flattened


def title_of(name: str, settings: dict[str, Any]) -> str:
    """`sort · seed 0 · llama · grpo, centered`; the name is harmless already."""
    if not settings:
        return name
    model = settings.get("model.path") or settings.get("model.config.model_type")
    chosen = [settings.get("loss.loss_type"), settings.get("advantages")]
    parts = [f"seed {settings.get('seed')}", model, ", ".join(map(str, filter(None, chosen)))]
    return " · ".join([name, *(plain(part) for part in parts if part)])


def differing(runs: Sequence[dict[str, Any]]) -> list[str]:
    """For each run the first few settings in which runs differ: `optim.lr=0.1, seed=2`."""
    keys = [key for key in dict.fromkeys(k for run in runs for k in run) if not key.startswith(OWN)]
    telling = [key for key in keys if any(run.get(key) != runs[0].get(key) for run in runs)]
    shown = telling[:MOST_SETTINGS]
    more = ", …" * (len(telling) > MOST_SETTINGS)
    return [", ".join(f"{key}={plain(run.get(key))}" for key in shown) + more for run in runs]


def plain(value: Any) -> str:
    """A value as a picture shows it: short, harmless."""
    text = escape_control(str(value))
    return text if len(text) <= LONGEST_VALUE else text[: LONGEST_VALUE - 1] + "…"
