"""Functions that read report files, and tables of their results."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.kernels.operations import OPERATIONS


# ---- report files ----
def load(path: str | Path) -> list[dict[str, Any]]:
    """Return the reports in a JSON file that a benchmark or a GPU session has written."""
    content = json.loads(Path(path).read_text())
    if "parts" not in content:
        return [content]
    return [report for part in content["parts"].values() for report in part.get("reports", [])]


def cases_of(paths: Iterable[str | Path]) -> list[dict[str, Any]]:
    """Return the cases of all reports, each with the hardware and the commit of its report."""
    found: list[dict[str, Any]] = []
    reports = (report for path in paths for report in load(path))
    for report in reports:
        where = {"hardware": report["hardware"], "commit": report["commit"]}
        cases = report.get("cases", ())  # the report of a step has no cases
        found += [{**where, **case} for case in cases if "operation" in case]
    return found


def machine(hardware: dict[str, Any]) -> str:
    """Return a one-line description of the hardware of a report."""
    if "gpu" in hardware:
        return str(hardware["gpu"])
    instructions = " ".join(hardware.get("instructions", [])) or "no SIMD"
    return f"{hardware['cores']} cores of {hardware['cpu']}, {instructions}"


# Names of processors by vendor, family and model, as in `measure.hardware`.
PROCESSORS = {
    "AMD EPYC (family 25, model 1)": "AMD Zen 3",
    "AMD EPYC (family 25, model 17)": "AMD Zen 4",
    "AMD EPYC (family 26, model 2)": "AMD Zen 5",
    "Intel(R) Xeon(R) Processor (family 6, model 167)": "Intel Xeon",
}


def short_machine(hardware: dict[str, Any]) -> str:
    """Return the hardware of a report in a few words, such as "2 cores, AMD Zen 5"."""
    if "gpu" in hardware:
        found = re.match(r"NVIDIA (\w+) (\d+)GB", hardware["gpu"])
        return f"{found[1]} {found[2]} GB" if found else str(hardware["gpu"])
    return f"{hardware['cores']} cores, {PROCESSORS.get(hardware['cpu'], hardware['cpu'])}"


# ---- tables ----
# Results that count for the column "error", which shows the largest of their errors.
SHOWN = ("grad_hidden", "grad_weight", "grad_logits", "logps")


def variant_words(case: dict[str, Any]) -> list[str]:
    """Return words for the softmax, the mask and the support of a case that are not the default."""
    words = [word for word in (case["softmax"], case["mask"]) if word not in ("flat", "full")]
    return words + ([f"support of {case['support']} ids"] if case.get("support") else [])


def case_table(case: dict[str, Any]) -> str:
    """Return the table of one case. The column ± shows half the interquartile range."""
    n, h, v = case["shape"]
    what = [f"N={n} H={h} V={v}", case["dtype"]]
    if case["active"] < 1:
        what.append(f"active {case['active']:g} ({case['inactive']})")
    what += variant_words(case)
    title = f"{OPERATIONS[case['operation']].title}   {'  '.join(what)}"
    title += f"\ngrpo_fast (auto) is: {case['route']}"
    units = [row["unit"] for row in case["rows"].values() if "unit" in row]
    unit = units[0] if units else "rate"
    rows = []
    for name, row in case["rows"].items():
        note = f"{row['status']}: {row['reason']}" if row.get("reason") else row.get("path", "")
        rows.append([name, *cells(row), note])
    return text_table(title, ["", "ms", "±", "× limit", unit, "MiB", "error", ""], rows)


def cells(row: dict[str, Any]) -> list[str]:
    """Return the numbers of a provider's row as strings, empty where nothing was measured."""
    errors = row.get("errors", {})
    error = f"{max(errors[key] for key in errors if key in SHOWN):.0e}" if errors else ""
    if "median_ms" not in row:
        return ["", "", "", "", "", error]
    digits = 1 if row["median_ms"] >= 100 else 3
    memory = f"{row['workspace_mib']:.0f}" if "workspace_mib" in row else ""
    times = [f"{row[name]:.{digits}f}" for name in ("median_ms", "spread_ms")]
    return [*times, f"{row['ratio_to_limit']:.2f}", f"{row['rate']:.3g}", memory, error]


def fastest_peer(case: dict[str, Any]) -> str | None:
    """Return the name of the fastest correct peer, or None if no peer was timed."""
    rows = case["rows"]
    peers = [n for n, row in rows.items() if row["role"] == "peer" and "median_ms" in row]
    return min(peers, key=lambda name: rows[name]["median_ms"], default=None)


def markdown(columns: Sequence[str], rows: Iterable[Iterable[object]]) -> list[str]:
    """Return the lines of a table in Markdown."""
    lines = [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    return lines + [f"| {' | '.join(map(str, row))} |" for row in rows]


def text_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table as text. The first and the last column are aligned to the left."""
    lines = [columns, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    texts = []
    for first, *numbers, last in lines:
        aligned = [text.rjust(width) for text, width in zip(numbers, widths[1:-1], strict=True)]
        texts.append("  ".join([first.ljust(widths[0]), *aligned, last]).rstrip())
    return "\n".join(["", title, *texts])
