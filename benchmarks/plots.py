"""The pictures of the README, from the JSON of one or several runs: time and memory over N, the limit by H, a roofline.

python -m benchmarks.plots benchmarks/results/FILE.json … [-o benchmarks/results/kernels.png]
"""

from __future__ import annotations

import argparse
import collections
import os
import sys
from pathlib import Path
from typing import Any

from benchmarks.reports import cases_of, machine

RESULTS = Path(__file__).resolve().parent / "results"
COLORS = {"ours": "#c0392b", "limit": "#7f8c8d", "dense": "#8e9aaf", "peer": "#2e6f9e"}
MARKERS = "os^Dv<>Pp*hX"
# (N·V scalars that must cross the bus, flops on each) where the work is moving bytes: exponentials and products.
LOGITS_FLOPS = 8


def curves(cases: list[dict[str, Any]], value: str) -> dict[str, Any]:
    """name -> (role, [(N, value)]) of the group of cases that differ in N alone and has most of them."""
    groups: dict[tuple, list[dict[str, Any]]] = collections.defaultdict(list)
    for case in cases:
        if case["operation"] == "linear_grpo_loss" and case["active"] == 1 and case["softmax"] == "flat":
            groups[(*case["shape"][1:], case["dtype"], case["allocator"], case["threads"])].append(case)
    key = max(groups, key=lambda k: len({case["shape"][0] for case in groups[k]}), default=None)
    found: dict[str, Any] = {"title": "", "lines": {}}
    if key is None or len({case["shape"][0] for case in groups[key]}) < 2:
        return found
    found["title"] = f"H={key[0]} V={key[1]} {key[2]}"
    for case in sorted(groups[key], key=lambda case: case["shape"][0]):
        for name, row in case["rows"].items():
            if value in row and not name.startswith("grpo_fast (torch"):
                found["lines"].setdefault(name, (row["role"], []))[1].append((case["shape"][0], row[value]))
    return found


def draw_curves(axes: Any, cases: list[dict[str, Any]], value: str, label: str) -> None:
    found = curves(cases, value)
    axes.set_title(f"{label} over tokens   {found['title']}", loc="left", fontsize=10)
    for index, (name, (role, points)) in enumerate(found["lines"].items()):
        style = {"color": COLORS[role]} if role != "peer" else {}
        width = 2.4 if role == "ours" else 1.1
        axes.plot(*zip(*points, strict=True), marker=MARKERS[index % len(MARKERS)], lw=width, ms=4, label=name, **style)
    empty_or_log(axes, bool(found["lines"]), "tokens N", label)


def empty_or_log(axes: Any, has_data: bool, x: str, y: str) -> None:
    if not has_data:
        axes.text(0.5, 0.5, "not measured", ha="center", va="center", transform=axes.transAxes, color="gray")
        axes.set_axis_off()
        return
    axes.set(xscale="log", yscale="log", xlabel=x, ylabel=y)
    axes.grid(True, which="major", alpha=0.3)
    axes.legend(fontsize=7, frameon=False)


def draw_fractions(axes: Any, cases: list[dict[str, Any]]) -> None:
    """Fraction of the three GEMMs by shape, ours and the best peer of each."""
    from benchmarks.tables import fastest_peer

    chosen = {}
    for case in cases:
        rows = case["rows"]
        if case["operation"] == "linear_grpo_loss" and case["active"] == 1 and case["softmax"] == "flat":
            if "median_ms" in rows.get("grpo_fast (auto)", {}) and case["allocator"] != "fair":
                chosen[(case["shape"][1], *case["shape"], case["dtype"])] = case
    axes.set_title("Fraction of the three GEMMs, by hidden size", loc="left", fontsize=10)
    for place, key in enumerate(sorted(chosen)):
        rows, best = chosen[key]["rows"], fastest_peer(chosen[key])
        axes.bar(place - 0.2, rows["grpo_fast (auto)"]["fraction_of_limit"], 0.38, color=COLORS["ours"])
        if best:
            axes.bar(place + 0.2, rows[best]["fraction_of_limit"], 0.38, color=COLORS["peer"])
            axes.text(place + 0.2, 0.02, best, rotation=90, ha="center", va="bottom", fontsize=6, color="white")
    axes.set_xticks(range(len(chosen)))
    axes.set_xticklabels([f"H={k[2]}\nN={k[1]}\nV={k[3]}" for k in sorted(chosen)], fontsize=6)
    axes.axhline(1, color="gray", lw=0.8)
    axes.set_ylabel("red: grpo_fast, blue: fastest peer", fontsize=8)


def roofline_points(cases: list[dict[str, Any]]) -> tuple[list[tuple[str, str, float, float]], float, float]:
    """(name, role, flop/byte, flop/s) of every timed row, and the measured peaks (flop/s, bytes/s; 0: not measured)."""
    points, peak, bandwidth = [], 0.0, 0.0
    for case in cases:
        if len(case.get("shape", ())) != 3 or case["active"] < 1:
            continue
        flops, moved = work(case)
        for name, row in case["rows"].items():
            if "median_ms" not in row:
                continue
            seconds = row["median_ms"] / 1e3
            if row["role"] == "limit":
                is_copy = name == "device copy"
                peak = peak if is_copy else max(peak, flops / seconds)
                bandwidth = max(bandwidth, moved / seconds) if is_copy else bandwidth
            elif name == "grpo_fast (auto)" or row["role"] == "peer":
                points.append((name, row["role"], flops / moved, flops / seconds))
    return points, peak, bandwidth


def work(case: dict[str, Any]) -> tuple[float, float]:
    """Flops and bytes that cannot be avoided: inputs read once, gradients written once."""
    (n, h, v), item = case["shape"], case["itemsize"]
    if case["operation"].startswith("logits"):
        return LOGITS_FLOPS * n * v, 2 * item * n * v
    gemms, crossings = (1, 1) if case["operation"] == "linear_logps" else (3, 2)
    return 2.0 * gemms * n * h * v, crossings * item * h * (n + v)


def draw_roofline(axes: Any, cases: list[dict[str, Any]]) -> None:
    points, peak, bandwidth = roofline_points(cases)
    axes.set_title("Roofline (work that cannot be avoided over measured time)", loc="left", fontsize=10)
    for role in ("peer", "ours"):
        chosen = [point for point in points if point[1] == role]
        if chosen:
            label = "grpo_fast" if role == "ours" else "peers"
            xs, ys = [point[2] for point in chosen], [point[3] / 1e9 for point in chosen]
            axes.scatter(xs, ys, s=22 if role == "ours" else 10, color=COLORS[role], label=label, zorder=3)
    if points and peak and bandwidth:
        low, high = min(p[2] for p in points) / 2, max(p[2] for p in points) * 2
        xs = [low * (high / low) ** (i / 100) for i in range(101)]
        roof = [min(peak, x * bandwidth) / 1e9 for x in xs]
        axes.plot(xs, roof, color=COLORS["limit"], lw=1.2, label="measured GEMM and copy")
    empty_or_log(axes, bool(points), "flop per byte", "GFLOP/s")


def draw(paths: list[str], out: Path) -> Path:
    """One picture of four panels.

    Raises:
        ValueError: a file that holds no results.
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
    figure.suptitle(f"linear_grpo_loss and its parts: {machine(cases[0]['hardware'])}", fontsize=11)
    figure.text(0.99, 0.005, f"commit {', '.join(commits)}", ha="right", fontsize=6, color="gray")
    figure.tight_layout(rect=(0, 0.01, 1, 0.98))
    figure.savefig(out, dpi=110)
    pyplot.close(figure)
    return out


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.plots", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", nargs="+", metavar="FILE", help="JSON of `python -m benchmarks` or gpu_session.sh")
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
