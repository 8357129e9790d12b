"""Picture of the tables: time and memory over N, fractions of the limit, and a roofline.

    python -m benchmarks.report.plots benchmarks/results/FILE.json … [-o FILE.png]

A curve contains the cases of one run. The roof of the roofline is measured on the same machine: the
copy in these runs, and the multiply-adds of benchmarks/kernels/ceiling.py. Without these
measurements the picture has no roof.
"""

from __future__ import annotations

import collections
import json
import os
import sys
from pathlib import Path
from typing import Any

from benchmarks import RESULTS
from benchmarks.kernels.ceiling import file_of
from benchmarks.options import new_parser
from benchmarks.report.files import cases_of, machine
from benchmarks.report.tables import fastest_peer

OURS = "grpo_fast (auto)"
COLORS = {"ours": "#c0392b", "limit": "#7f8c8d", "peer": "#2e6f9e"}
MARKERS = "os^Dv<>Pp*hX"
PEERS = ["#2e6f9e", "#e08e0b", "#3a9d5d", "#7d5ba6", "#8c6d46", "#17becf", "#bcbd22", "#444444"]
# Flops for each of the N·V logits, exponentials included, of the operations that start from logits.
LOGITS_FLOPS = 8


def is_standard(case: dict[str, Any]) -> bool:
    is_loss = case["operation"] == "linear_grpo_loss" and case["allocator"] != "fair"
    return is_loss and case["active"] == 1 and case["softmax"] == "flat"


def curves(cases: list[dict[str, Any]], value: str) -> tuple[str, dict[str, Any]]:
    """Return (title, name -> (role, [(N, value)])) of the run and head with most values of N."""
    groups: dict[tuple, list[dict[str, Any]]] = collections.defaultdict(list)
    for case in filter(is_standard, cases):
        groups[(case["report"], *case["shape"][1:], case["dtype"])].append(case)
    key = max(groups, key=lambda key: len(groups[key]), default=None)
    if key is None or len(groups[key]) < 2:
        return "", {}
    lines: dict[str, Any] = {}
    for case in sorted(groups[key], key=lambda case: case["shape"][0]):
        for name, row in case["rows"].items():
            if value in row and row["role"] in COLORS and name in (OURS, *others(case)):
                lines.setdefault(name, (row["role"], []))[1].append((case["shape"][0], row[value]))
    return f"H={key[1]} V={key[2]} {key[3]}", lines


def others(case: dict[str, Any]) -> list[str]:
    return [name for name, row in case["rows"].items() if row["role"] != "ours"]


def draw_curves(axes: Any, cases: list[dict[str, Any]], value: str, label: str) -> None:
    title, lines = curves(cases, value)
    axes.set_title(f"{label} over tokens   {title}", loc="left", fontsize=10)
    axes.set_prop_cycle(color=PEERS)
    for index, (name, (role, points)) in enumerate(lines.items()):
        style: dict[str, Any] = {"color": COLORS[role]} if role != "peer" else {}
        style |= {"ls": "--"} if role == "limit" else {}
        style |= {"lw": 3.2, "zorder": 1} if role == "ours" else {"lw": 1.1}  # drawn above ours
        marker = MARKERS[index % len(MARKERS)]
        axes.plot(*zip(*points, strict=True), marker=marker, ms=4, label=name, **style)
    empty_or_log(axes, bool(lines), "tokens N", label)


def empty_or_log(axes: Any, has_data: bool, x: str, y: str) -> None:
    if not has_data:
        where = {"ha": "center", "va": "center", "transform": axes.transAxes}
        axes.text(0.5, 0.5, "not measured", color="gray", **where)
        axes.set_axis_off()
        return
    axes.set(xscale="log", yscale="log", xlabel=x, ylabel=y)
    axes.grid(True, which="major", alpha=0.3)
    axes.legend(fontsize=7, frameon=False)


def draw_fractions(axes: Any, cases: list[dict[str, Any]]) -> None:
    """Draw the fraction of the three GEMMs by shape, for ours and for the fastest peer."""
    chosen = {}
    for case in filter(is_standard, cases):
        if "median_ms" in case["rows"].get(OURS, {}):
            n, h, v = case["shape"]
            chosen[(h, v, n, case["dtype"])] = case
    axes.set_title("Fraction of the three GEMMs, by shape", loc="left", fontsize=10)
    for place, key in enumerate(sorted(chosen)):
        rows, best = chosen[key]["rows"], fastest_peer(chosen[key])
        axes.bar(place - 0.2, rows[OURS]["fraction_of_limit"], 0.38, color=COLORS["ours"])
        if best:
            axes.bar(place + 0.2, rows[best]["fraction_of_limit"], 0.38, color=COLORS["peer"])
            style = {"rotation": 90, "ha": "center", "va": "bottom", "fontsize": 6}
            axes.text(place + 0.2, 0.02, best, color="white", **style)
    axes.set_xticks(range(len(chosen)))
    labels = [f"H={h}\nN={n}\nV={v}" for h, v, n, _ in sorted(chosen)]
    axes.set_xticklabels(labels, fontsize=6)
    axes.axhline(1, color="gray", lw=0.8)
    axes.set_ylabel("red: grpo_fast, blue: fastest peer", fontsize=8)


def ceiling(cases: list[dict[str, Any]]) -> tuple[float, float]:
    """Return (flop/s, bytes/s) of the machine of these cases.

    A value that was not measured is 0.
    """
    file = file_of(cases[0]["hardware"])
    known = json.loads(file.read_text()) if file.is_file() else {}
    flops = known.get("flops", {}).get(cases[0]["dtype"], 0.0)
    copies = [
        work(case)[1] / case["rows"]["device copy"]["median_ms"] * 1e3
        for case in cases
        if "median_ms" in case["rows"].get("device copy", {})
    ]
    return flops, max([known.get("copy_bytes", 0.0), *copies])


def roofline_points(cases: list[dict[str, Any]]) -> list[tuple[str, float, float]]:
    """Return (role, flop/byte, flop/s) of ours and of every peer, for cases where all rows are
    active.
    """
    points = []
    for case in cases:
        flops, moved = work(case)
        for name, row in case["rows"].items():
            is_shown = name == OURS or row["role"] == "peer"
            if is_shown and "median_ms" in row and case["active"] == 1:
                points.append((row["role"], flops / moved, flops / row["median_ms"] * 1e3))
    return points


def work(case: dict[str, Any]) -> tuple[float, float]:
    """Return the smallest possible flops and bytes: inputs read once, gradients written once."""
    (n, h, v), item = case["shape"], case["itemsize"]
    if case["operation"].startswith("logits"):
        return LOGITS_FLOPS * n * v, 2 * item * n * v
    gemms, crossings = (1, 1) if case["operation"] == "linear_logps" else (3, 2)
    return 2.0 * gemms * n * h * v, crossings * item * h * (n + v)


def draw_roofline(axes: Any, cases: list[dict[str, Any]]) -> None:
    """Draw the roofline of the dtype with the most cases, because each dtype has its own roof."""
    counts = collections.Counter(case["dtype"] for case in cases)
    dtype = counts.most_common(1)[0][0]
    cases = [case for case in cases if case["dtype"] == dtype]
    points, (peak, bandwidth) = roofline_points(cases), ceiling(cases)
    title = f"Roofline, {dtype}: work that cannot be avoided over measured time"
    axes.set_title(title, loc="left", fontsize=10)
    for role, label, size in (("peer", "peers", 10), ("ours", "grpo_fast", 24)):
        chosen = [(x, y / 1e9) for kind, x, y in points if kind == role]
        if chosen:
            style = {"color": COLORS[role], "s": size, "zorder": 3}
            axes.scatter(*zip(*chosen, strict=True), label=label, **style)
    if points and peak and bandwidth:
        low, high = min(p[1] for p in points) / 2, max(p[1] for p in points) * 2
        corner = peak / bandwidth
        xs = sorted({low, high, min(max(corner, low), high)})
        roof = [min(peak, x * bandwidth) / 1e9 for x in xs]
        label = f"multiply-adds {peak / 1e9:.0f} GFLOP/s, copy {bandwidth / 1e9:.0f} GB/s"
        axes.plot(xs, roof, color=COLORS["limit"], lw=1.4, label=label)
    elif points:
        where = {"transform": axes.transAxes, "fontsize": 7, "color": "gray", "va": "top"}
        axes.text(0.03, 0.96, "no roof: not measured on this machine", **where)
    empty_or_log(axes, bool(points), "flop per byte", "GFLOP/s")
    if points:
        axes.legend(fontsize=7, frameon=False, loc="lower right")


def draw(paths: list[str], out: Path) -> Path:
    """Draw one picture of four panels.

    Raises:
        ValueError: the files contain no results.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    cases = [case for case in cases_of(paths) if len(case.get("shape", ())) == 3]
    if not cases:
        raise ValueError("results: expected at least one measured case, got none")
    figure, axes = pyplot.subplots(2, 2, figsize=(12, 8))
    draw_curves(axes[0][0], cases, "median_ms", "milliseconds")
    draw_curves(axes[0][1], cases, "workspace_mib", "MiB beyond inputs and gradients")
    draw_fractions(axes[1][0], cases)
    draw_roofline(axes[1][1], cases)
    commits = sorted({case["commit"] for case in cases})
    hardware = machine(cases[0]["hardware"])
    figure.suptitle(f"linear_grpo_loss and its parts: {hardware}", fontsize=11)
    style = {"ha": "right", "fontsize": 6, "color": "gray"}
    figure.text(0.99, 0.005, f"commit {', '.join(commits)}", **style)
    figure.tight_layout(rect=(0, 0.01, 1, 0.98))
    figure.savefig(out, dpi=110)
    pyplot.close(figure)
    return out


def main(arguments: list[str]) -> int:
    parser = new_parser("python -m benchmarks.report.plots", __doc__)
    parser.add_argument("results", nargs="+", metavar="FILE", help="JSON of a benchmark")
    parser.add_argument("-o", "--out", default=str(RESULTS / "kernels.png"))
    options = parser.parse_args(arguments)
    try:
        print(f"written: {os.path.relpath(draw(options.results, Path(options.out)))}")
    except ValueError as error:
        print(f"plots: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
