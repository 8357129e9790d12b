"""Picture of README.md: time of all providers at single shapes, and memory over tokens.

`python -m benchmarks.report.readme` draws it from the files in benchmarks/results/.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from benchmarks.report.files import short_machine

OURS = "grpo_fast (auto)"
RED = "#c0392b"
MARKERS = "os^Dv<>Pp*hX"
PEERS = ["#2e6f9e", "#e08e0b", "#3a9d5d", "#7d5ba6", "#8c6d46", "#17becf", "#bcbd22", "#444444"]
LONGEST_BAR = 4  # longest bar of a panel, relative to the second shortest


def draw_readme(timed: list[dict[str, Any]], memory: dict[str, Any], out: Path) -> None:
    """Draw the picture of README.md: bars of time for some cases, and memory over tokens.

    Args:
        timed: one case of `linear_grpo_loss` for each panel of bars.
        memory: the report of benchmarks.kernels.memory.
        out: path of the picture.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    places = [f"time {index}" for index in range(len(timed))]
    figure, axes = pyplot.subplot_mosaic([places, ["memory"] * len(timed)], figsize=(9.6, 7.4))
    for place, case in zip(places, timed, strict=True):
        draw_bars(axes[place], case)
    draw_memory(axes["memory"], memory)
    commits = {re.sub(r"^(\w{12})\w*", r"\1", case["commit"]) for case in [*timed, memory]}
    note = f"measured at {', '.join(sorted(commits))}"
    figure.suptitle("Loss and its gradients: lower is better", fontsize=13)
    figure.text(0.99, 0.005, note, ha="right", fontsize=8, color="gray")
    figure.tight_layout(rect=(0, 0.02, 1, 1))
    figure.savefig(out, dpi=110)
    pyplot.close(figure)


def draw_bars(axes: Any, case: dict[str, Any]) -> None:
    """Draw the time of each provider, divided by the time of the three matrix products."""
    values = {
        "grpo_fast" if name == OURS else name: row["ratio_to_limit"]
        for name, row in case["rows"].items()
        if "median_ms" in row and (name == OURS or row["role"] == "peer")
    }
    names = sorted(values, key=lambda name: -values[name])
    longest = LONGEST_BAR * sorted(values.values())[1]
    colors = [RED if name == "grpo_fast" else "#9db8cc" for name in names]
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
    counts: set[int] = set()
    axes.set_prop_cycle(color=PEERS)
    for marker, (name, provider) in zip(MARKERS, report["providers"].items(), strict=False):
        rows = {int(tokens): row for tokens, row in provider.get("tokens", {}).items()}
        counts |= rows.keys()
        points = {n: row["workspace_mib"] for n, row in rows.items() if row["status"] == "ok"}
        if not points:
            continue
        style: dict[str, Any] = {"color": RED, "lw": 3.2} if name == OURS else {"lw": 1.4}
        label = "grpo_fast" if name == OURS else name
        (line,) = axes.plot([*points], [*points.values()], marker=marker, label=label, **style)
        last = max(points)
        for tokens in (n for n, row in rows.items() if row["status"] == "out of memory"):
            ends = [last, tokens], [points[last], limit]
            axes.plot(*ends, color=line.get_color(), ls=":", marker="X", ms=9, markevery=[1])
    axes.axhline(limit, color="gray", lw=0.8)
    axes.set_title(
        f"{short_machine(report['hardware'])}: memory besides inputs and gradients\n"
        f"hidden {report['hidden']}, vocabulary {report['vocabulary']:,}, {report['dtype']}, "
        f"1 thread; ✖ runs out of {report['limit_gib']} GiB",
        loc="left", fontsize=11,
    )  # fmt: skip
    axes.set(xscale="log", yscale="log")
    axes.set_xlabel("tokens", fontsize=11)
    axes.set_ylabel("MiB", fontsize=11)
    axes.grid(True, which="major", alpha=0.3)
    axes.set_xticks(sorted(counts), [f"{count:,}" for count in sorted(counts)], fontsize=11)
    axes.set_yticks([64, 512, 4096, limit], ["64", "512", "4096", f"{limit}"], fontsize=11)
    axes.set_ylim(top=9 * limit)
    axes.minorticks_off()
    axes.legend(fontsize=11, frameon=False, loc="upper left", ncols=3)
