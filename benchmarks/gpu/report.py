"""Report of the GPU sessions in Markdown, which compares measurements with predictions.

    python -m benchmarks.gpu.report [RESULTS.json] [-o REPORT.md]

The command reads benchmarks/results/gpu_session.json and writes benchmarks/gpu/REPORT.md, with
tables for each card. A "bar" is a target value (bars.py). A missing measurement is shown as "not
measured".
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from benchmarks import RESULTS, ROOT
from benchmarks.gpu import predict
from benchmarks.gpu.bars import OURS, Bar, Results, bars
from benchmarks.gpu.parts import BY_NAME, parts
from benchmarks.gpu.predict import CARDS, Case
from benchmarks.kernels.shapes import MODELS, Shape
from benchmarks.options import new_parser
from benchmarks.report.files import cases_of, load, machine
from benchmarks.report.tables import markdown

SESSION = RESULTS / "gpu_session.json"
REPORT = ROOT / "benchmarks" / "gpu" / "REPORT.md"
NOTHING = "not measured"
BAR_COLUMNS = "bar | wanted | predicted | measured"
TIME_COLUMNS = (
    "configuration | limit ms | ours ms | besides inputs and gradients, MiB "
    "| predicted parts of ours, ms"
)
CANDIDATE_COLUMNS = "configuration | predicted ms | measured ms | of the shipped kernel, measured"
PART_COLUMNS = "visit | part | limit s | status | took s | finished"


def rendered(path: Path) -> str:
    """Return the text of the report. Without the file, every result is "not measured".

    Raises:
        SystemExit: the results have no commit.
    """
    paths = [path] if path.is_file() else []
    reports = [report for file in paths for report in load(file)]
    for report in reports:
        if report.get("commit", "none") == "none":
            raise SystemExit(
                f"results: expected the commit of every report, got none in {path}. "
                "Call gpu_session.sh with --commit HASH."
            )
    done = json.loads(path.read_text()).get("parts", {}) if paths else {}
    every_case = cases_of(paths)
    lines = ["# A GPU session: predicted and measured", "", *origin(reports), ""]
    for name in CARDS:
        own = [x for x in reports if name in str(x.get("hardware", {}).get("gpu", ""))]
        cases = [c for c in every_case if name in str(c["hardware"].get("gpu", ""))]
        cases = [case for case in cases if case.get("allocator") == "cuda"]
        found = Results([case for case in cases if not case.get("support")], own)
        supported = Results([case for case in cases if case.get("support") == 50], own)
        lines += table(f"## Bars on an {name}", BAR_COLUMNS, bar_rows(name, found))
        title = f"## Times on an {name}, predicted / measured"
        lines += table(title, TIME_COLUMNS, time_rows(name, found, supported))
        title = f"## Candidates of the row kernel on an {name}, (8192, 151936) in bf16"
        lines += table(title, CANDIDATE_COLUMNS, candidate_rows(name, own))
        lines += profiles(name, own)
    lines += table("## Parts of the session", PART_COLUMNS, session_rows(done))
    return "\n".join(lines).rstrip() + "\n"


def origin(reports: list[dict[str, Any]]) -> Iterator[str]:
    """Yield lines with the machine, the commit and the package versions of the measurements."""
    yield "Written by `python -m benchmarks.gpu.report`. All figures are for bf16 on one GPU."
    on_gpu = [r for r in reports if "gpu" in r.get("hardware", {})]
    if not on_gpu:
        yield "**Nothing is measured.** `bash benchmarks/gpu_session.sh`, twice, measures it."
        return
    for where in dict.fromkeys((machine(r["hardware"]), r["commit"]) for r in on_gpu):
        yield f"- {where[0]}; commit {where[1]}"
    versions = on_gpu[-1]["versions"]
    named = [f"{name} {version}" for name, version in versions.items() if "not " not in version]
    yield f"- {', '.join(named[:8])}"


def table(title: str, columns: str, rows: Iterable[Iterable[Any]]) -> Iterator[str]:
    """Yield the lines of a table in Markdown. `columns` has the titles, separated by "|"."""
    yield from (title, "", *markdown(columns.split(" | "), rows), "")


def bar_rows(card: str, found: Results) -> Iterator[tuple[str, ...]]:
    for bar in bars(card, found):
        wanted = f"{'≥' if bar.at_least else '≤'} {bar.text(bar.wanted)}"
        guess = "none" if bar.predicted is None else judged(bar, bar.predicted)
        measured = NOTHING if bar.value is None else judged(bar, bar.value)
        yield bar.title, wanted, guess, measured


def judged(bar: Bar, value: float) -> str:
    """Return the text of a value, and whether it misses the bar."""
    return bar.text(value) if bar.holds(value) else f"{bar.text(value)} **missed**"


def time_rows(card: str, found: Results, supported: Results) -> Iterator[tuple[str, ...]]:
    """Yield rows of the table of times and workspace sizes, with cells "predicted / measured".

    `supported` has the measurements with a support of 50 ids, which have no prediction.
    """
    for case, (*guesses, slowest) in predict.estimates(card).items():
        cells = time_cells([f"{number:.1f}" for number in guesses], found.rows(case))
        yield predict.label(case), *cells, slowest
    for operation in ("linear_grpo_loss", "linear_grpo_loss_frozen", "linear_logps"):
        case = Case(operation, Shape(8192, *MODELS["qwen3-8b"]))
        cells = time_cells(["none"] * 3, supported.rows(case))
        yield f"{predict.label(case)}, support of 50 ids", *cells, "none"


def time_cells(guesses: list[str], rows: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Yield the cells with the time of the limit, our time and our workspace size."""
    ours = rows.get(OURS, {})
    limits = [row["median_ms"] for row in rows.values() if row["role"] == "limit"]
    values = min(limits, default=None), ours.get("median_ms"), ours.get("workspace_mib")
    for guess, value in zip(guesses, values, strict=True):
        yield f"{guess} / {NOTHING if value is None else f'{value:.1f}'}"


def candidate_rows(card: str, reports: list[dict[str, Any]]) -> Iterator[tuple[str, ...]]:
    """Yield the predicted and measured time of each candidate that strides over rows."""
    found = [report["row_candidates"] for report in reports if "row_candidates" in report]
    rows = found[-1] if found else {}
    for line, guess in predict.predictions(card)["row_candidates_ms"].items():
        times = rows.get(line, {})
        if "candidate" not in times:
            yield f"`{line}`", f"{guess:.1f}", times.get("reason", NOTHING), ""
            continue
        share = f"{times['candidate'] / times['shipped']:.2f}×"
        yield f"`{line}`", f"{guess:.1f}", f"{times['candidate']:.2f}", share


def profiles(name: str, reports: list[dict[str, Any]]) -> Iterator[str]:
    yield f"## Kernels of one call on an {name}"
    yield ""
    # Show only the newest profile of each shape.
    found = (entry for report in reports for entry in report.get("profiles", ()))
    entries = {tuple(entry["shape"]): entry for entry in found}
    if not entries:
        yield f"{NOTHING.capitalize()}: `python -m benchmarks.gpu.kernel_times`."
        yield ""
    for sizes, entry in entries.items():
        shape = ", ".join(map(str, sizes))
        busy, whole = entry["us_in_kernels"] / 1e3, entry["us_without_profiler"] / 1e3
        title = f"({shape}): the GPU works for {busy:.2f} ms of a call of {whole:.2f} ms. "
        title += f"The {len(entry['kernels'])} slowest kernels, copies and fills:"
        rows = ((f"{k['us']:.1f}", f"{k['calls']:.0f}", f"`{k['kernel'][:100]}`")
                for k in entry["kernels"])  # fmt: skip
        yield from table(title, "us per call | number per call | kernel, copy or fill", rows)


def session_rows(done: dict[str, dict[str, Any]]) -> Iterator[tuple[Any, ...]]:
    for name, part in parts().items():
        was = done.get(name, {"status": "not run", "seconds": "", "finished": ""})
        visit = "by name" if part.visit == BY_NAME else part.visit
        yield visit, name, part.seconds, was["status"], was["seconds"], was["finished"]


def main(arguments: list[str]) -> None:
    parser = new_parser(__doc__)
    parser.add_argument("results", nargs="?", type=Path, default=SESSION)
    parser.add_argument("-o", "--out", type=Path, default=REPORT)
    options = parser.parse_args(arguments)
    options.out.write_text(rendered(options.results))
    print(f"written: {options.out}")


if __name__ == "__main__":
    main(sys.argv[1:])
