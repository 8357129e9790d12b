"""Measure the tables of the loss on this CPU, and update benchmarks/README.md and README.md.

    python -m benchmarks.report.readme                    measure everything (15 minutes)
    python -m benchmarks.report.readme --only loss large  measure some steps (--help names all)
    python -m benchmarks.report.readme --tables           only update the tables and the picture

Measure on a quiet machine. Each step writes benchmarks/results/cpu-STEP-PROCESSOR.json. The command
then draws readme.png, and updates the tables in benchmarks/README.md and the table of the loss in
README.md. The GPU tables come from gpu_session.json, which benchmarks/gpu_session.sh writes. The
memory in benchmarks/README.md and readme.png comes from cpu-memory.json, which `python -m
benchmarks.kernels.memory` writes.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks import RESULTS, ROOT, measure
from benchmarks.kernels.operations import OURS
from benchmarks.options import new_parser
from benchmarks.report import tables

PAGE = ROOT / "benchmarks" / "README.md"
README = ROOT / "README.md"
DEVICES = ("cpu", "gpu")
BEGIN, END = "<!-- {} tables: begin -->", "<!-- {} tables: end -->"


CPU = "--device cpu --allocator default"
SMALL = "--shapes 1024,256,8192 512,896,32000"
FAST = "--providers grpo_fast plain compile CCE"
PARTS = "linear_logps linear_logps_backward logits_grpo_loss logits_grpo_loss_inplace"
TOKENS = "--shapes 64,cpu-s 256,cpu-s 1024,cpu-s 4096,cpu-s"
PEAKED = "--shapes 1024,256,8192 --active 1.0 0.2 --softmax peaked --mask ragged"
FAIR = "--device cpu --allocator fair"
OURS_ONCE = "--providers auto plain compile CCE --backend auto"
BF16 = f"--budget 1 --shapes 1024,256,8192 --dtype bf16 {OURS_ONCE}"
# Options of `grpo-fast bench` for each step. Budgets are in seconds for each candidate and case.
STEPS = {
    "loss": f"{CPU} --backend auto --budget 1.5 {SMALL}",
    "large": f"{CPU} --budget 1 --shapes 512,896,151936 {OURS_ONCE}",
    "bf16": f"{CPU} {BF16}",
    "fair": f"{FAIR} --budget 1 {SMALL} {OURS_ONCE}",
    "fair-bf16": f"{FAIR} {BF16}",
    "parts": f"{PARTS} {CPU} --budget 1.5 {SMALL} {FAST} TRL",
    "tokens": f"{CPU} --budget 1.5 {TOKENS} {FAST} TRL Liger",
    "peaked": f"{CPU} --budget 1 {PEAKED} {FAST}",
}
LOSS_STEPS = ("loss", "large", "bf16", "fair", "fair-bf16")  # those in the table of README.md
# Processors in the order in which the tables show them.
MACHINES = ("zen3", "zen4", "zen5", "xeon")
BARS_SHAPE = [512, 896, 32000]  # the CPU's shape in readme.png, which all peers ran


def file_of(name: str) -> Path:
    return RESULTS / f"cpu-{name}.json"


def processor() -> str:
    """Return the name of this machine's processor in the names of files, such as "zen3".

    Raises:
        SystemExit: the processor has no name in `PROCESSORS`.
    """
    cpu = measure.hardware("cpu")["cpu"]
    if cpu not in tables.PROCESSORS:
        raise SystemExit(
            f"processor: expected one of {list(tables.PROCESSORS)}, got {cpu}. Add it to "
            "PROCESSORS in benchmarks/report/tables.py and to MACHINES in readme.py."
        )
    return tables.PROCESSORS[cpu].partition(" ")[2].lower().replace(" ", "")


def machine_files(steps: Iterable[str] = STEPS) -> list[Path]:
    """Return the results of the steps that exist, in the order of `MACHINES`."""
    files = (file_of(f"{step}-{name}") for name in MACHINES for step in steps)
    return [file for file in files if file.is_file()]


def run_step(name: str, out: Path) -> int:
    """Run a step, and return its exit code."""
    print(f"== {name}", flush=True)
    command = [sys.executable, "-m", "benchmarks", *STEPS[name].split(), "--out", str(out)]
    return subprocess.run(command, cwd=ROOT, check=False).returncode


def device_tables(device: str) -> str:
    """Return the tables for "cpu" or "gpu" in Markdown, with one table for each operation."""
    cases = tables.cases_of([RESULTS / "gpu_session.json"] if device == "gpu" else machine_files())
    groups: dict[str, list[dict[str, Any]]] = {}
    for case in cases:
        groups.setdefault(tables.machine(case["hardware"]), []).append(case)
    return "\n".join(line for name, group in groups.items() for line in machine_lines(name, group))


def machine_lines(name: str, cases: list[dict[str, Any]]) -> list[str]:
    """Return the lines of the tables of one machine."""
    commits = sorted({case["commit"] for case in cases})
    lines = [f"{name};", f"commits: {', '.join(commits)}.", ""]
    for operation in dict.fromkeys(case["operation"] for case in cases):
        chosen = [case for case in cases if case["operation"] == operation]
        rows = [row for case in chosen for row in case["rows"].items()]
        shown = (n for n, x in rows if x["role"] in ("ours", "peer") and x["status"] != "missing")
        names = list(dict.fromkeys(shown))
        found = ([label(x), limit(x), *(cell(x, name) for name in names)] for x in chosen)
        lines += [f"`{operation}`", "", *tables.markdown(["N, H, V", "limit", *names], found), ""]
    return lines


def readme_table() -> str:
    """Return the table of the loss in README.md: the H100, then CPUs measured at a clean commit.

    A row of the fair allocator is shown if a different provider is the fastest with it.
    """
    peers = [case for case in read_cases(RESULTS / "gpu_session.json") if "TRL" in case["rows"]]
    every = [case for file in machine_files(LOSS_STEPS) for case in read_cases(file)]
    timed = [case for case in every if case["shape"][0] > 64 and "+" not in case["commit"]]
    rows = []
    first: dict[str, str] = {}
    for case in [*peers, *timed]:
        what = f"{', '.join(map(str, case['shape']))} {case['dtype']}"
        where = tables.short_machine(case["hardware"])
        peer = tables.fastest_peer(case)
        ours, best = (case["rows"][name]["ratio_to_limit"] for name in (OURS, peer))
        winner = "ours" if ours < best else str(peer)
        if case["allocator"] == "fair":
            if winner == first.get(what + where):
                continue
            what += ", pages kept"
        first[what + where] = winner
        mine = f"**{ours:.2f}×**" if f"{ours:.2f}" < f"{best:.2f}" else f"{ours:.2f}×"
        theirs = f"**{best:.2f}×**" if f"{best:.2f}" < f"{ours:.2f}" else f"{best:.2f}×"
        rows.append([what, where, mine, f"{theirs} {peer}"])
    columns = ["tokens, hidden, vocabulary", "machine", "grpo_fast", "best peer"]
    return "\n".join(tables.markdown(columns, rows)) + "\n"


def memory_table() -> str:
    """Return the table of the peak memory in MiB, with a row for each number of tokens."""
    report = json.loads(file_of("memory").read_text())
    providers = {n: p["tokens"] for n, p in report["providers"].items() if "tokens" in p}
    names = [name.replace(OURS, "grpo_fast") for name in providers]
    table = []
    for tokens in providers[OURS]:
        rows = [rows.get(tokens, {}) for rows in providers.values()]
        cells = [
            f"{row['workspace_mib']:,.0f}" if row.get("status") == "ok" else row.get("status", "")
            for row in rows
        ]
        table.append([f"{int(tokens):,}", *cells])
    where = f"{tables.machine(report['hardware'])}; commit: {report['commit']}."
    return "\n".join([where, "", *tables.markdown(["tokens", *names], table)]) + "\n"


def read_cases(file: Path) -> list[dict[str, Any]]:
    return [case for case in tables.cases_of([file]) if case["operation"] == "linear_grpo_loss"]


def label(case: dict[str, Any]) -> str:
    words = [", ".join(map(str, case["shape"])), case["dtype"]]
    words += [case["allocator"]] if case["allocator"] == "fair" else []
    inactive = case.get("inactive", "masked")
    words += [f"{case['active']:g} active"] if case["active"] < 1 else []
    words += [f"(rest: {inactive})"] if inactive != "masked" else []
    return " ".join(words + tables.variant_words(case))


def limit(case: dict[str, Any]) -> str:
    times = {name: row["median_ms"] for name, row in case["rows"].items() if row["role"] == "limit"}
    best = min(times, key=lambda name: times[name])
    return f"{best} {times[best]:.{0 if times[best] >= 100 else 2}f} ms"


def cell(case: dict[str, Any], name: str) -> str:
    row = case["rows"].get(name)
    if row is None:
        return ""
    if "median_ms" not in row:
        return str(row["status"])
    memory = f"{max(row['workspace_mib'], 0.0):.0f} MiB"
    error = max(value for key, value in row["errors"].items() if key != "loss")
    return f"{row['ratio_to_limit']:.2f}× {memory}" + (f" {error:.0e}" if error > 1e-3 else "")


def refreshed(text: str, new: dict[str, str]) -> str:
    """Return the text of a page with new tables between the marks `BEGIN` and `END`."""
    for name, table in new.items():
        before, begin, rest = text.partition(BEGIN.format(name))
        _, end, after = rest.partition(END.format(name))
        text = f"{before}{begin}\n{table}{end}{after}"
    return text


def pages() -> dict[Path, str]:
    """Return the new text of each page with tables."""
    found = {
        PAGE: {device: device_tables(device) for device in DEVICES} | {"memory": memory_table()},
        README: {"loss": readme_table()},
    }
    return {page: refreshed(page.read_text(), new) for page, new in found.items()}


# ---- the picture ----
RED = "#c0392b"
MARKERS = "os^Dv<>Pp*hX"
PEERS = ["#2e6f9e", "#e08e0b", "#3a9d5d", "#7d5ba6", "#8c6d46", "#17becf", "#bcbd22", "#444444"]
LONGEST_BAR = 4  # longest bar of a panel, relative to the second shortest


def draw_readme() -> None:
    """Draw readme.png: bars of time for the H100 and the first CPU, and the memory over tokens."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    gpu = next(x for x in read_cases(RESULTS / "gpu_session.json") if "TRL" in x["rows"])
    cpu = next(x for x in read_cases(machine_files()[0]) if x["shape"] == BARS_SHAPE)
    memory = json.loads(file_of("memory").read_text())
    figure, axes = pyplot.subplot_mosaic([["gpu", "cpu"], ["memory"] * 2], figsize=(9.6, 7.4))
    draw_bars(axes["gpu"], gpu)
    draw_bars(axes["cpu"], cpu)
    draw_memory(axes["memory"], memory)
    commits = {re.sub(r"^(\w{12})\w*", r"\1", x["commit"]) for x in (gpu, cpu, memory)}
    note = f"measured at {', '.join(sorted(commits))}"
    figure.suptitle("Loss and its gradients: lower is better", fontsize=13)
    figure.text(0.99, 0.005, note, ha="right", fontsize=8, color="gray")
    figure.tight_layout(rect=(0, 0.02, 1, 1))
    figure.savefig(RESULTS / "readme.png", dpi=110)
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
        f"{tables.short_machine(case['hardware'])}: time ÷ three matrix products\n"
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
        f"{tables.short_machine(report['hardware'])}: memory besides inputs and gradients\n"
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


# ---- the command ----


def main(arguments: list[str]) -> int:
    parser = new_parser(__doc__)
    parser.add_argument("--only", nargs="+", choices=tuple(STEPS), default=list(STEPS))
    parser.add_argument("--tables", action="store_true", help="measure nothing")
    options = parser.parse_args(arguments)
    steps = [] if options.tables else options.only
    codes = [run_step(name, file_of(f"{name}-{processor()}")) for name in steps]
    draw_readme()
    for page, text in pages().items():
        page.write_text(text)
    print("written: README.md, benchmarks/README.md and benchmarks/results/readme.png")
    return 1 if any(codes) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
