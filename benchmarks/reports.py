"""Reading what the benchmarks wrote: one report, or the results of a session on a GPU, which holds several."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def load(path: str | Path) -> list[dict[str, Any]]:
    """The reports of a file.

    Raises:
        ValueError: a file that no benchmark wrote.
    """
    try:
        content = json.loads(Path(path).read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise ValueError(f"results: expected a JSON file of a benchmark, got {path}: {error}") from None
    if "parts" in content:
        return [report for part in content["parts"].values() for report in part.get("reports", [])]
    if "cases" not in content:
        raise ValueError(f'results: expected a JSON file of a benchmark with "cases", got {path}')
    return [content]


def cases_of(paths: Iterable[str | Path]) -> list[dict[str, Any]]:
    """The cases of all reports, each with the hardware and the commit of its report."""
    found = []
    for path in paths:
        for report in load(path):
            where = {"hardware": report["hardware"], "commit": report["commit"]}
            found += [{**where, **case} for case in report["cases"] if "operation" in case]
    return found


def machine(hardware: dict[str, Any]) -> str:
    """What a figure is quoted with, in one line."""
    if "gpu" in hardware:
        return str(hardware["gpu"])
    return f"{hardware['cores']} cores of {hardware['cpu']}, {' '.join(hardware.get('instructions', [])) or 'no SIMD'}"
