"""Reports as files: written whole, read singly or out of a GPU session, which holds several."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def write(path: Path, content: Any) -> None:
    """JSON, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(path.name + ".new")
    scratch.write_text(json.dumps(content, indent=1) + "\n")
    scratch.replace(path)


def load(path: str | Path) -> list[dict[str, Any]]:
    """The reports of a file.

    Raises:
        ValueError: a file that no benchmark wrote.
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
    """The cases of all reports, each with the hardware, the commit and the number of its report."""
    found: list[dict[str, Any]] = []
    reports = (report for path in paths for report in load(path))
    for number, report in enumerate(reports):
        where = {"hardware": report["hardware"], "commit": report["commit"], "report": number}
        cases = report.get("cases", ())  # a step has none
        found += [{**where, **case} for case in cases if "operation" in case]
    return found


def machine(hardware: dict[str, Any]) -> str:
    """What a figure is quoted with, in one line."""
    if "gpu" in hardware:
        return str(hardware["gpu"])
    instructions = " ".join(hardware.get("instructions", [])) or "no SIMD"
    return f"{hardware['cores']} cores of {hardware['cpu']}, {instructions}"
