"""Report of the GPU sessions in Markdown, which compares measurements with predictions.

    python -m benchmarks.gpu.report [RESULTS.json] [-o REPORT.md]

The command reads benchmarks/results/gpu_session.json and writes benchmarks/gpu/REPORT.md, with
tables for each card. A missing measurement is shown as "not measured".

predictions.json has the predicted times and memory. They were computed from flops and bytes that
were counted by hand, before the visit that measures them. The script that computed them is
benchmarks/gpu/predict.py at the commit that predictions.json names. LOG.md has the reasons.

A bar is an acceptance threshold with a prediction and, if it was measured, a value. A bar that is a
ratio compares two times of the same run, such as the time of grpo_fast and the time of a limit. The
bars for contexts depend on the memory of the card.
"""

from __future__ import annotations

import functools
import json
import math
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import RESULTS, ROOT
from benchmarks.gpu.session import BY_NAME, STEPS, parts
from benchmarks.kernels.operations import MODELS, OURS, Shape
from benchmarks.options import new_parser
from benchmarks.report.tables import cases_of, load, machine, markdown

# ---- predictions ----
FILE = Path(__file__).with_name("predictions.json")
CARDS = {"H100": 78 << 30, "H200": 139 << 30}  # bytes of memory


class Case(NamedTuple):
    """Operation, shape and active rows of a benchmark case, as in `Variant` of problem.py."""

    operation: str
    shape: Shape
    active: float = 1.0
    inactive: str = "masked"


class Estimate(NamedTuple):
    """Prediction for one case.

    Attributes:
        limit_ms: time of the limit. It is one bare GEMM, three GEMMs or a copy.
        ours_ms: time of grpo_fast.
        workspace_mib: peak memory, without inputs and gradients.
        parts: the three slowest parts of grpo_fast's call, and their times in ms.
    """

    limit_ms: float
    ours_ms: float
    workspace_mib: float
    parts: str

    @property
    def ratio(self) -> float:
        """Return the time of grpo_fast divided by the time of the limit."""
        return self.ours_ms / self.limit_ms


@functools.cache
def predictions(card: str) -> dict[str, Any]:
    """Return all predictions for a card, as the file stores them."""
    found: dict[str, Any] = json.loads(FILE.read_text())["cards"][card]
    return found


@functools.cache
def estimates(card: str) -> dict[Case, Estimate]:
    """Return the predictions for a card, in the order of the report."""
    found = {}
    for row in predictions(card)["cases"]:
        case = Case(row["operation"], Shape(*row["shape"]), row["active"], row["inactive"])
        found[case] = Estimate(*(row[name] for name in Estimate._fields))
    return found


def label(case: Case) -> str:
    rows = "" if case.active == 1 else f", {case.active:g} active ({case.inactive})"
    return f"{case.operation} {','.join(map(str, case.shape))}{rows}"


# ---- bars ----
RATIOS = {"qwen3-8b": 1.12, "qwen3-1.7b": 1.15, "qwen2.5-0.5b": 1.30}
# For each (prompt, completion, group) in STEPS: the required speedup over TRL's step, and the
# speedup that LOG.md predicts for Qwen2.5-0.5B.
STEP_RATIOS = dict(zip(STEPS, ((5.0, 6.9), (3.0, 4.3), (1.3, 1.5)), strict=True))
# Number of prompt tokens that must fit on an H200, for each model. For a card with less memory, the
# required number is lower in proportion. No part of the session measures it. The command is
# python -m benchmarks.trainers.step --device cuda --providers shared --model-config M --prompt N
# with --lora 16 for the 7B model.
CONTEXTS = {"qwen2.5-0.5b": 1_000_000, "qwen2.5-1.5b": 650_000, "qwen2.5-7b": 300_000}


class Results(NamedTuple):
    """Measurements of one card.

    Attributes:
        cases: the cases of the kernel benchmarks, oldest first.
        reports: the reports of all benchmarks.
    """

    cases: list[dict[str, Any]]
    reports: list[dict[str, Any]]

    def rows(self, case: Case, other: str = OURS) -> dict[str, dict[str, Any]]:
        """Return the timed rows of a case from the newest run that timed grpo_fast and `other`.

        `other` is the name or the role of a provider. Without such a run, the dict is empty.
        """
        for found in reversed(self.cases):
            timed = {name: row for name, row in found["rows"].items() if "median_ms" in row}
            known = {*timed, *(row["role"] for row in timed.values())}
            fields = found["operation"], Shape(*found["shape"]), found["active"], found["inactive"]
            if Case(*fields) == case and {OURS, other} <= known:
                return timed
        return {}

    def value(self, case: Case, field: str) -> float | None:
        """Return a field of grpo_fast's row in the newest run of a case, or None if none exists."""
        return self.rows(case).get(OURS, {}).get(field)


class Bar(NamedTuple):
    """A measured value with an upper or a lower bound.

    Attributes:
        title: description of the value in the report.
        wanted: the bound.
        predicted: the predicted value, or None if there is no prediction.
        value: the measured value, or None if it was not measured.
        unit: text after the value.
        at_least: True if `wanted` is a lower bound.
    """

    title: str
    wanted: float
    predicted: float | None
    value: float | None
    unit: str = "×"
    at_least: bool = False

    def holds(self, value: float) -> bool:
        return value >= self.wanted if self.at_least else value <= self.wanted

    def text(self, value: float) -> str:
        digits = 0 if self.wanted >= 1000 else 2
        return f"{value:,.{digits}f}{self.unit}"


def bars(card: str, results: Results) -> list[Bar]:
    """Return all bars for a card, with the most important bar first."""
    heads = [Shape(8192, *MODELS[name]) for name in RATIOS]
    small = Shape(1024, *MODELS["qwen2.5-0.5b"])
    title = "head forward + backward / three GEMMs"
    limits = zip((*heads, small), (*RATIOS.values(), 1.35), strict=True)
    found = [ratio(card, results, "linear_grpo_loss", title, *pair) for pair in limits]
    found += [over_peer(results, shape, "TRL", 2.5) for shape in heads]
    found += [over_peer(results, shape, "peer", 1.0) for shape in (*heads, small)]
    title = "linear_logps without gradient / one GEMM"
    found += [ratio(card, results, "linear_logps", title, shape, 1.10) for shape in heads]
    found += [sparse(card, results, inactive) for inactive in ("masked", "zero-advantage")]
    operations = ("logits_grpo_loss_inplace", "logits_grpo_loss")
    found += [copy_share(card, results, operation) for operation in operations]
    longest = Shape(131072, *MODELS["qwen3-8b"])
    found += [peak(card, results, shape) for shape in (*heads, longest)]
    found += [step_ratio(results, sizes) for sizes in STEPS]
    return found + [context(card, results, name) for name in CONTEXTS]


def title_of(shape: Shape) -> str:
    return f"N = {shape.n}, H = {shape.h}, V = {shape.v}"


def ratio(
    card: str, results: Results, operation: str, title: str, shape: Shape, wanted: float
) -> Bar:
    """Return a bar for the time of an operation divided by the time of its limit."""
    case = Case(operation, shape)
    value = results.value(case, "ratio_to_limit")
    title = f"{title}, {title_of(shape)}"
    return Bar(title, wanted, estimates(card)[case].ratio, value)


def over_peer(results: Results, shape: Shape, peer: str, wanted: float) -> Bar:
    """Return a bar for the speedup over a peer, or over the fastest peer if `peer` is "peer"."""
    case = Case("linear_grpo_loss", shape)
    rows = results.rows(case, peer)
    peers = [row["median_ms"] for name, row in rows.items() if peer in (name, row["role"])]
    value = min(peers) / rows[OURS]["median_ms"] if peers else None
    title = f"faster than {'the fastest peer' if peer == 'peer' else peer}, {title_of(shape)}"
    return Bar(title, wanted, None, value, at_least=True)


def sparse(card: str, results: Results, inactive: str) -> Bar:
    """Return a bar for the speedup of a call with 20% active rows over a call with 100%.

    The two runs may differ in speed, so each time is first divided by the limit of its run.
    """
    dense = Case("linear_grpo_loss", Shape(8192, *MODELS["qwen3-8b"]))
    case = dense._replace(active=0.2, inactive=inactive)
    pair = [results.value(c, "ratio_to_limit") for c in (dense, case)]
    value = pair[0] / pair[1] if pair[0] and pair[1] else None
    guess = estimates(card)[dense].ours_ms / estimates(card)[case].ours_ms
    title = f"0.2 active rows ({inactive}) over all, {title_of(case.shape)}"
    return Bar(title, 2.0, guess, value, at_least=True)


def copy_share(card: str, results: Results, operation: str) -> Bar:
    case = Case(operation, Shape(8192, 64, 151936))
    ratio = results.value(case, "ratio_to_limit")
    title = f"{operation}, share of a copy's speed"
    guess = 1 / estimates(card)[case].ratio
    value = None if ratio is None else 1 / ratio
    return Bar(title, 0.8, guess, value, at_least=True)


def peak(card: str, results: Results, shape: Shape) -> Bar:
    """Return a bar for the peak memory. Its bound is the prediction, rounded up to 0.05 GiB."""
    case = Case("linear_grpo_loss", shape)
    planned = estimates(card)[case].workspace_mib / 1024
    value = results.value(case, "workspace_mib")
    title = f"peak besides inputs and gradients, {title_of(shape)}"
    wanted = math.ceil(20 * planned) / 20
    value = None if value is None else value / 1024
    return Bar(title, wanted, planned, value, " GiB")


def step_ratio(results: Results, sizes: tuple[int, int, int]) -> Bar:
    wanted, guess = STEP_RATIOS[sizes]
    value = None
    for report in results.reports:
        settings, rows = report.get("settings", {}), report.get("providers", {})
        same = tuple(settings.get(name) for name in ("prompt", "completion", "group")) == sizes
        if same and {"TRL", "shared"} <= rows.keys():
            value = rows["TRL"]["median_ms"] / rows["shared"]["median_ms"]
    prompt, completion, group = sizes
    size = f"{prompt} + {group} x {completion} tokens"
    title = f"training step faster than TRL's, Qwen2.5-0.5B, {size}"
    return Bar(title, wanted, guess, value, at_least=True)


def context(card: str, results: Results, model: str) -> Bar:
    """Return a bar for the longest prompt with which a training step fits into GPU memory."""
    prompts = [
        float(report["settings"]["prompt"])
        for report in results.reports
        if report.get("settings", {}).get("model_config") == model
        and "shared" in report.get("providers", {})
    ]
    # Ignore shorter prompts. Their runs measured the time of a step, not the memory limit.
    value = max((prompt for prompt in prompts if prompt >= 100_000), default=None)
    wanted = CONTEXTS[model] * CARDS[card] // CARDS["H200"] // 1000 * 1000
    title = f"context of a step that fits, {model}"
    return Bar(title, wanted, None, value, " tokens", at_least=True)


# ---- the report ----
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
    for case, (*guesses, slowest) in estimates(card).items():
        cells = time_cells([f"{number:.1f}" for number in guesses], found.rows(case))
        yield label(case), *cells, slowest
    for operation in ("linear_grpo_loss", "linear_grpo_loss_frozen", "linear_logps"):
        case = Case(operation, Shape(8192, *MODELS["qwen3-8b"]))
        cells = time_cells(["none"] * 3, supported.rows(case))
        yield f"{label(case)}, support of 50 ids", *cells, "none"


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
    for line, guess in predictions(card)["row_candidates_ms"].items():
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
