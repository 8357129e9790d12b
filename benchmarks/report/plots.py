"""Pictures for benchmarks/README.md and for the main README.md.

`python -m benchmarks.report.readme` draws them from the files in benchmarks/results/.

The first picture has two panels: time over the number of tokens, and time relative to the limit.
All points of a curve come from one run.

The second picture, for README.md, compares the time of all providers at single shapes, and their
memory over the number of tokens. The third picture compares the time and the memory of an update
with a pretrained model.
"""

from __future__ import annotations

import collections
import contextlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.report.files import cases_of, machine, short_machine
from benchmarks.report.tables import fastest_peer

OURS = "grpo_fast (auto)"
COLORS = {"ours": "#c0392b", "limit": "#7f8c8d", "peer": "#2e6f9e"}
MARKERS = "os^Dv<>Pp*hX"
PEERS = ["#2e6f9e", "#e08e0b", "#3a9d5d", "#7d5ba6", "#8c6d46", "#17becf", "#bcbd22", "#444444"]
LONGEST_BAR = 4  # longest bar of a panel, relative to the second shortest


def is_standard(case: dict[str, Any]) -> bool:
    is_loss = case["operation"] == "linear_grpo_loss" and case["allocator"] != "fair"
    return is_loss and case["active"] == 1 and case["softmax"] == "flat"


def draw_curves(axes: Any, cases: list[dict[str, Any]]) -> None:
    """Draw the time over the number of tokens, for grpo_fast, the peers and the limits.

    All points come from one report and one LM head, the pair with the most token counts.
    """
    groups: dict[tuple, list[dict[str, Any]]] = collections.defaultdict(list)
    for case in filter(is_standard, cases):
        groups[(case["report"], *case["shape"][1:], case["dtype"])].append(case)
    (_, h, v, dtype), chosen = max(groups.items(), key=lambda item: len(item[1]))
    lines: dict[str, tuple[str, list[tuple[int, float]]]] = {}
    for case in sorted(chosen, key=lambda case: case["shape"][0]):
        for name, row in case["rows"].items():
            if "median_ms" in row and (name == OURS or row["role"] != "ours"):
                points = lines.setdefault(name, (row["role"], []))[1]
                points.append((case["shape"][0], row["median_ms"]))
    axes.set_title(f"Milliseconds over tokens, H={h} V={v} {dtype}", loc="left", fontsize=12)
    axes.set_prop_cycle(color=PEERS)
    for index, (name, (role, points)) in enumerate(lines.items()):
        style: dict[str, Any] = {"color": COLORS[role]} if role != "peer" else {}
        style |= {"ls": "--"} if role == "limit" else {}
        style |= {"lw": 3.2, "zorder": 1} if role == "ours" else {"lw": 1.1}
        marker = MARKERS[index % len(MARKERS)]
        axes.plot(*zip(*points, strict=True), marker=marker, ms=4, label=name, **style)
    log_axes(axes, "tokens N", "milliseconds")
    axes.legend(fontsize=11, frameon=False)


def log_axes(axes: Any, x: str, y: str) -> None:
    axes.set(xscale="log", yscale="log")
    axes.set_xlabel(x, fontsize=11)
    axes.set_ylabel(y, fontsize=11)
    axes.grid(True, which="major", alpha=0.3)


def draw_relative_times(axes: Any, cases: list[dict[str, Any]]) -> None:
    """Draw the times of grpo_fast and of the fastest peer, divided by the time of three GEMMs."""
    chosen = {}
    for case in filter(is_standard, cases):
        if "median_ms" in case["rows"].get(OURS, {}):
            n, h, v = case["shape"]
            chosen[(h, v, n, case["dtype"])] = case
    title = "Time relative to the three GEMMs, by shape (lower is better)"
    axes.set_title(title, loc="left", fontsize=12)
    for place, key in enumerate(sorted(chosen)):
        rows = chosen[key]["rows"]
        best = fastest_peer(chosen[key])
        axes.bar(place - 0.2, rows[OURS]["ratio_to_limit"], 0.38, color=COLORS["ours"])
        if best:
            axes.bar(place + 0.2, rows[best]["ratio_to_limit"], 0.38, color=COLORS["peer"])
            style = {"rotation": 90, "ha": "center", "va": "bottom", "fontsize": 11}
            axes.text(place + 0.2, 0.02, best, color="white", **style)
    axes.set_xticks(range(len(chosen)))
    labels = [f"H={h}\nN={n}\nV={v}" for h, v, n, _ in sorted(chosen)]
    axes.set_xticklabels(labels, fontsize=11)
    axes.axhline(1, color="gray", lw=0.8)
    axes.set_ylabel("red: grpo_fast, blue: fastest peer", fontsize=11)


def draw(paths: list[str], out: Path) -> Path:
    """Draw the picture with two panels, and return its path."""
    cases = cases_of(paths)
    title = f"linear_grpo_loss and its parts: {machine(cases[0]['hardware'])}"
    with picture(out, (9.6, 9), (2, 1), title, commits_of(cases)) as axes:
        draw_curves(axes[0], cases)
        draw_relative_times(axes[1], cases)
    return out


def draw_steps(paths: list[Path], out: Path) -> None:
    """Draw the time and the memory of an update with a pretrained model for each prompt length.

    Args:
        paths: results of benchmarks.trainers.step.
        out: path of the picture.
    """
    reports = [json.loads(path.read_text()) for path in paths]
    rows: dict[int, dict[str, Any]] = {}
    for report in sorted(reports, key=lambda report: report["prompt_tokens"]):
        found = rows.setdefault(report["prompt_tokens"][0], {})
        found |= {name: row for name, row in report["providers"].items() if name not in found}
    shown: list[tuple[int, str, dict[str, Any]]] = []  # place, name and results of each bar
    ticks = {}
    for number, (tokens, providers) in enumerate(rows.items()):
        start = len(shown) + number  # leaves a gap between the prompt lengths
        ticks[start + (len(providers) - 1) / 2] = f"{tokens:,} prompt tokens"
        shown += [(start + i, name, row) for i, (name, row) in enumerate(providers.items())]
    places, names, results = zip(*shown, strict=True)
    colors = [COLORS["ours" if name in ("shared", "packed") else "peer"] for name in names]
    panels = (
        ("median_ms", 1e-3, "CPU seconds of an update (lower is better)"),
        ("peak_mib", 1 / 1024, "GiB beyond weights and moments (lower is better)"),
    )
    title = f"Update of SmolLM2-135M on one thread, {reports[0]['hardware']['cpu']}"
    with picture(out, (11, 4.4), (1, 2), title, commits_of(reports)) as axes:
        for panel, (value, scale, label) in zip(axes, panels, strict=True):
            panel.set_title(label, loc="left", fontsize=11)
            heights = [row[value] * scale for row in results]
            labels = [f"{name}\n{height:.3g}" for name, height in zip(names, heights, strict=True)]
            panel.bar_label(panel.bar(places, heights, 0.85, color=colors), labels, fontsize=10)
            panel.set_xticks([*ticks], [*ticks.values()], fontsize=10)
            panel.margins(y=0.18)
            panel.spines[["top", "right"]].set_visible(False)


@contextlib.contextmanager
def picture(
    out: Path, size: tuple[float, float], grid: Any, title: str, note: str
) -> Iterator[Any]:
    """Yield the axes of a new figure. On exit, add the title and the note, and save the figure.

    `grid` is (rows, columns), or the names of the panels as in `pyplot.subplot_mosaic`.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    if isinstance(grid, tuple):
        figure, axes = pyplot.subplots(*grid, figsize=size)
    else:
        figure, axes = pyplot.subplot_mosaic(grid, figsize=size)
    yield axes
    figure.suptitle(title, fontsize=13)
    figure.text(0.99, 0.005, note, ha="right", fontsize=8, color="gray")
    figure.tight_layout(rect=(0, 0.02, 1, 1))
    figure.savefig(out, dpi=110)
    pyplot.close(figure)


def commits_of(cases: list[dict[str, Any]]) -> str:
    short = {re.sub(r"^(\w{12})\w*", r"\1", case["commit"]) for case in cases}
    return f"measured at {', '.join(sorted(short))}"


def draw_readme(timed: list[dict[str, Any]], memory: dict[str, Any], out: Path) -> None:
    """Draw the picture of README.md: bars of time for some cases, and memory over tokens.

    Args:
        timed: one case of `linear_grpo_loss` for each panel of bars.
        memory: the report of benchmarks.kernels.memory.
        out: path of the picture.
    """
    places = [f"time {index}" for index in range(len(timed))]
    grid = [places, ["memory"] * len(timed)]
    title = "Loss and its gradients: lower is better"
    with picture(out, (9.6, 7.4), grid, title, commits_of([*timed, memory])) as axes:
        for place, case in zip(places, timed, strict=True):
            draw_bars(axes[place], case)
        draw_memory(axes["memory"], memory)


def draw_bars(axes: Any, case: dict[str, Any]) -> None:
    """Draw the time of each provider, divided by the time of the three matrix products."""
    values = {
        "grpo_fast" if name == OURS else name: row["ratio_to_limit"]
        for name, row in case["rows"].items()
        if "median_ms" in row and (name == OURS or row["role"] == "peer")
    }
    names = sorted(values, key=lambda name: -values[name])
    longest = LONGEST_BAR * sorted(values.values())[1]
    colors = [COLORS["ours"] if name == "grpo_fast" else "#9db8cc" for name in names]
    drawn = axes.barh(names, [min(values[name], longest) for name in names], color=colors)
    cut = {name: " (bar cut)" if values[name] > longest else "" for name in names}
    labels = [f"{values[name]:.2f}×{cut[name]}" for name in names]
    axes.bar_label(drawn, labels, padding=4, fontsize=11)
    tokens, width, vocabulary = case["shape"]
    axes.set_title(
        f"{short_machine(case['hardware'])}: time ÷ three matrix products\n"
        f"{tokens:,} tokens, hidden {width:,}, vocabulary {vocabulary:,}, {case['dtype']}",
        loc="left", x=-0.3, fontsize=11,
    )  # fmt: skip
    axes.tick_params(axis="y", labelsize=11)
    axes.set_xlim(0, 1.5 * min(longest, max(values.values())))
    axes.axvline(1, color="gray", lw=0.8)
    axes.set_xticks([])
    axes.spines[["top", "right", "bottom"]].set_visible(False)


def draw_memory(axes: Any, report: dict[str, Any]) -> None:
    """Draw the peak memory over the number of tokens, and where each provider runs out of it."""
    limit = report["limit_gib"] * 1024
    ended: dict[int, list[str]] = {}  # names of the providers that run out at a number of tokens
    axes.set_prop_cycle(color=PEERS)
    for index, (name, provider) in enumerate(report["providers"].items()):
        rows = {int(tokens): row for tokens, row in provider.get("tokens", {}).items()}
        points = {
            tokens: row["workspace_mib"] for tokens, row in rows.items() if row["status"] == "ok"
        }
        if not points:
            continue
        is_ours = name == OURS
        style: dict[str, Any] = {"color": COLORS["ours"], "lw": 3.2} if is_ours else {"lw": 1.4}
        label = "grpo_fast" if is_ours else name
        marker = MARKERS[index % len(MARKERS)]
        (line,) = axes.plot([*points], [*points.values()], marker=marker, label=label, **style)
        for tokens, row in rows.items():
            if row["status"] == "out of memory":
                last = max(points)
                axes.plot([last, tokens], [points[last], limit], color=line.get_color(), ls=":")
                ended.setdefault(tokens, []).append(label)
    for tokens, names in ended.items():
        axes.plot(tokens, limit, marker="X", ms=11, color="black", clip_on=False)
        style = {"ha": "center", "va": "bottom", "fontsize": 11, "textcoords": "offset points"}
        axes.annotate("\n".join(names), (tokens, limit), (0, 8), **style)
    axes.axhline(limit, color="gray", lw=0.8)
    axes.set_title(
        f"{short_machine(report['hardware'])}: memory besides inputs and gradients\n"
        f"hidden {report['hidden']}, vocabulary {report['vocabulary']:,}, {report['dtype']}, "
        f"1 thread; ✖ runs out of {report['limit_gib']} GiB",
        loc="left", fontsize=11,
    )  # fmt: skip
    log_axes(axes, "tokens", "MiB")
    counts = sorted({int(n) for p in report["providers"].values() for n in p.get("tokens", {})})
    axes.set_xticks(counts, [f"{count:,}" for count in counts], fontsize=11)
    axes.set_yticks([64, 512, 4096, limit], ["64", "512", "4096", f"{limit}"], fontsize=11)
    axes.set_ylim(top=9 * limit)
    axes.minorticks_off()
    axes.legend(fontsize=11, frameon=False, loc="upper left", ncols=3)
