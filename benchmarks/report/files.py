"""Report files: a benchmark writes one report, a GPU session writes several."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def write(path: Path, content: Any) -> None:
    """Write JSON. An interruption leaves the old file unchanged."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(path.name + ".new")
    scratch.write_text(json.dumps(content, indent=1) + "\n")
    scratch.replace(path)


def load(path: str | Path) -> list[dict[str, Any]]:
    """Return the reports of a file.

    Raises:
        ValueError: the file was not written by a benchmark.
    """
    try:
        content = json.loads(Path(path).read_text())
    except (OSError, json.JSONDecodeError) as error:
        message = f"results: expected a JSON file of a benchmark, got {path}: {error}"
        raise ValueError(message) from None
    if "parts" in content:
        parts = content["parts"].values()
        return [report for part in parts for report in part.get("reports", [])]
    if "cases" not in content:
        raise ValueError(f'results: expected a JSON file of a benchmark with "cases", got {path}')
    return [content]


def cases_of(paths: Iterable[str | Path]) -> list[dict[str, Any]]:
    """Return the cases of all reports, each with its report's hardware, commit and number."""
    found: list[dict[str, Any]] = []
    reports = (report for path in paths for report in load(path))
    for number, report in enumerate(reports):
        where = {"hardware": report["hardware"], "commit": report["commit"], "report": number}
        cases = report.get("cases", ())  # the report of a step has no cases
        found += [{**where, **case} for case in cases if "operation" in case]
    return found


def machine(hardware: dict[str, Any]) -> str:
    """Return one line that names the hardware of a figure."""
    if "gpu" in hardware:
        return str(hardware["gpu"])
    instructions = " ".join(hardware.get("instructions", [])) or "no SIMD"
    return f"{hardware['cores']} cores of {hardware['cpu']}, {instructions}"
