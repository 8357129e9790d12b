"""Functions that write report files, and read those of a benchmark or of a GPU session."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def write(path: Path, content: Any) -> None:
    """Write `content` as JSON. If this is interrupted, the old file remains unchanged."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(path.name + ".new")
    scratch.write_text(json.dumps(content, indent=1) + "\n")
    scratch.replace(path)


def load(path: str | Path) -> list[dict[str, Any]]:
    """Return the reports in a JSON file that a benchmark or a GPU session has written."""
    content = json.loads(Path(path).read_text())
    if "parts" not in content:
        return [content]
    return [report for part in content["parts"].values() for report in part.get("reports", [])]


def cases_of(paths: Iterable[str | Path]) -> list[dict[str, Any]]:
    """Return the cases of all reports, each with the hardware, commit and number of its report."""
    found: list[dict[str, Any]] = []
    reports = (report for path in paths for report in load(path))
    for number, report in enumerate(reports):
        where = {"hardware": report["hardware"], "commit": report["commit"], "report": number}
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
