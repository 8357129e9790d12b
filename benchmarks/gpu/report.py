"""What a GPU session found, in Markdown: every bar with what was predicted and what was measured.

    python -m benchmarks.gpu.report [RESULTS.json] [-o REPORT.md]

Reads benchmarks/results/gpu_session.json and writes benchmarks/gpu/REPORT.md. What was not measured
is called so, with the command that will.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import RESULTS, ROOT
from benchmarks.gpu import predict, sparse, tune
from benchmarks.gpu.bars import OURS, Bar, Results, bars
from benchmarks.gpu.parts import parts
from benchmarks.gpu.patch import patched
from benchmarks.gpu.risks import RISKS
from benchmarks.kernels.shapes import Shape
from benchmarks.options import new_parser
from benchmarks.report.files import cases_of, load, machine

SESSION = RESULTS / "gpu_session.json"
REPORT = ROOT / "benchmarks" / "gpu" / "REPORT.md"
NOTHING = "not measured"


def rendered(path: Path) -> str:
    """The whole page; without a file nothing was measured.

    Raises:
        ValueError: a file that no benchmark wrote.
    """
    paths = [path] if path.is_file() else []
    reports = [report for file in paths for report in load(file)]
    found = Results([c for c in cases_of(paths) if c.get("allocator") == "cuda"], reports)
    done = json.loads(path.read_text()).get("parts", {}) if paths else {}
    sections = (origin(reports), bar_table(found), times(found), one_chunk(reports), gemms(reports),
                live_tiles(reports), profiles(reports), session_table(done),
                risks())  # fmt: skip
    lines = ["# A GPU session: predicted against measured", ""]
    for section in sections:
        lines += [*section, ""]
    return "\n".join(lines).rstrip() + "\n"


def origin(reports: list[dict[str, Any]]) -> Iterator[str]:
    """Where the figures are from."""
    yield "Written by `python -m benchmarks.gpu.report`; bf16, one NVIDIA H200 wanted."
    on_gpu = [r for r in reports if "gpu" in r.get("hardware", {})]
    if not on_gpu:
        yield "**Nothing is measured**: `bash benchmarks/gpu_session.sh`, three times, measures it."
        return
    for where in dict.fromkeys((machine(r["hardware"]), r["commit"]) for r in on_gpu):
        yield f"- {where[0]}; commit {where[1]}"
    versions = on_gpu[-1]["versions"]
    named = [f"{name} {version}" for name, version in versions.items() if "not " not in version]
    yield f"- {', '.join(named[:8])}"


def bar_table(found: Results) -> Iterator[str]:
    yield "## Bars"
    yield ""
    yield "| bar | wanted | predicted | measured | command |"
    yield "|---|---|---|---|---|"
    for bar in bars():
        value = bar.measured(found)
        wanted = f"{'≥' if bar.at_least else '≤'} {bar.text(bar.wanted)}"
        guess = "none" if bar.predicted is None else judged(bar, bar.predicted)
        measured = NOTHING if value is None else judged(bar, value)
        yield f"| {bar.title} | {wanted} | {guess} | {measured} | `{bar.command}` |"


def judged(bar: Bar, value: float) -> str:
    return bar.text(value) + ("" if bar.holds(value) else " **missed**")


def times(found: Results) -> Iterator[str]:
    """Milliseconds and workspace behind the ratios, predicted / measured."""
    yield "## Times, predicted / measured"
    yield ""
    yield "| configuration | limit ms | ours ms | beyond inputs and gradients, MiB |"
    yield "|---|---|---|---|"
    for case in predict.cases():
        guess, rows = predict.estimate(case), found.rows(case, OURS) or {}
        ours = rows.get(OURS, {})
        limits = [row["median_ms"] for row in rows.values() if row["role"] == "limit"]
        pairs = [
            (guess.limit * 1e3, min(limits, default=None)),
            (guess.ours * 1e3, ours.get("median_ms")),
            (guess.workspace / predict.MIB, ours.get("workspace_mib")),
        ]
        cells = [against(a, b) for a, b in pairs]
        yield f"| {predict.label(case)} | {' | '.join(cells)} |"


def against(guess: float, measured: float | None) -> str:
    return f"{guess:.1f} / {NOTHING if measured is None else f'{measured:.1f}'}"


def one_chunk(reports: list[dict[str, Any]]) -> Iterator[str]:
    """The loss by the workspace that bounds its chunks (benchmarks.gpu.tune --workspaces)."""
    yield "## One chunk and several, ms predicted / measured"
    yield ""
    yield "| rows, H, V | workspace | chunks | ms | × three GEMMs, predicted |"
    yield "|---|---|---|---|---|"
    found = [report["workspaces"] for report in reports if "workspaces" in report]
    for hidden in tune.WORKSPACE_HIDDEN:
        shape = Shape(tune.ROWS, hidden, tune.LINEAR_HEADS[0][1])
        for mib in tune.WORKSPACES_MIB:
            with patched(predict, WORKSPACE=mib * predict.MIB):
                guess = predict.estimate(predict.Case("linear_grpo_loss", shape))
                chunks, _ = predict.chunk_plan(*shape)
            row = found[-1].get(",".join(map(str, shape)), {}) if found else {}
            ms = against(guess.ours * 1e3, row.get(f"{mib} MiB", {}).get("median_ms"))
            where = f"{', '.join(map(str, shape))} | {mib} MiB | {chunks}"
            yield f"| {where} | {ms} | {guess.ours / guess.limit:.2f} |"


def live_tiles(reports: list[dict[str, Any]]) -> Iterator[str]:
    """Dense gradients beside those of live tiles, predicted for the share that was live."""
    yield "## `grad_filter` by live tiles of E, ms predicted / measured"
    yield ""
    yield "| rows | H | tolerance | live tiles | ms | × three GEMMs, predicted |"
    yield "|---|---|---|---|---|---|"
    entries = [row for report in reports for row in report.get("live_tiles", ())]
    for hidden in sparse.HIDDEN:
        shape = Shape(sparse.ROWS, hidden, sparse.VOCAB)
        dense = predict.estimate(predict.Case("linear_grpo_loss", shape))
        for call, counted in (("dense", 1.0), *predict.LIVE_SHARES.items()):
            rows = [row for row in entries if (row["hidden"], row["call"]) == (hidden, f"{call}")]
            row = rows[-1] if rows else {}
            live = row.get("live", counted)
            guess = sum(predict.live_tiles(shape, live).values())
            guess = dense.ours if call == "dense" else guess
            ms = against(guess * 1e3, row.get("median_ms"))
            where = f"{shape.n} | {hidden} | {call} | {live:.3f}"
            yield f"| {where} | {ms} | {guess / dense.limit:.2f} |"


def gemms(reports: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the table of what benchmarks.gpu.gemms measured."""
    yield "## The vendor's products alone"
    yield ""
    entries = [row for report in reports for row in report.get("gemms", ())]
    if not entries:
        yield f"{NOTHING.capitalize()}: `python -m benchmarks.gpu.gemms`."
        return
    yield "| rows | H | product | ms | TFLOP/s |"
    yield "|---|---|---|---|---|"
    for row in entries:
        cells = ["does not run", row.get("reason", "")]
        if "tflops" in row:
            cells = [f"{row['median_ms']:.3f}", f"{row['tflops']:.0f}"]
        where = (str(row["rows"]), str(row["hidden"]), row["product"])
        yield f"| {' | '.join((*where, *cells))} |"


def profiles(reports: list[dict[str, Any]]) -> Iterator[str]:
    yield "## Kernels of one call"
    yield ""
    entries = [entry for report in reports for entry in report.get("profiles", ())]
    if not entries:
        yield f"{NOTHING.capitalize()}: `python -m benchmarks.gpu.kernel_times`."
    for entry in entries:
        shape = ", ".join(map(str, entry["shape"]))
        inside, whole = entry["us_in_kernels"] / 1e3, entry["us_without_profiler"] / 1e3
        where = f"{inside:.2f} ms in {entry['launches']:.0f} launches"
        yield f"({shape}): {where}, {whole:.2f} ms a call."
        yield ""
        yield "| us | calls | kernel |"
        yield "|---|---|---|"
        for row in entry["kernels"]:
            yield f"| {row['us']:.1f} | {row['calls']:.0f} | `{row['kernel'][:100]}` |"
        yield ""


def session_table(done: dict[str, dict[str, Any]]) -> Iterator[str]:
    yield "## Parts of the session"
    yield ""
    yield "| call | part | limit s | status | took s | finished |"
    yield "|---|---|---|---|---|---|"
    for name, part in parts().items():
        was = done.get(name, {"status": "not run", "seconds": "", "finished": ""})
        cells = (part.call, name, part.seconds, was["status"], was["seconds"], was["finished"])
        yield f"| {' | '.join(map(str, cells))} |"


def risks() -> Iterator[str]:
    yield "## What may go wrong the first time"
    yield ""
    yield "| part | risk | where to look, what to do |"
    yield "|---|---|---|"
    yield from (f"| {' | '.join(risk)} |" for risk in RISKS)


def main(arguments: list[str]) -> int:
    parser = new_parser("python -m benchmarks.gpu.report", __doc__)
    parser.add_argument("results", nargs="?", type=Path, default=SESSION)
    parser.add_argument("-o", "--out", type=Path, default=REPORT)
    options = parser.parse_args(arguments)
    try:
        options.out.write_text(rendered(options.results))
    except ValueError as error:
        print(f"report: {error}", file=sys.stderr)
        return 2
    print(f"written: {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
