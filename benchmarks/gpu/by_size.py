"""Command line of the benchmarks that time several sizes, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from benchmarks import measure
from benchmarks.options import measuring
from benchmarks.report.files import write

Size = tuple[int, int, int]  # rows, H, V
SMALL = (16, 32, 96)  # the only size on a CPU


def run(
    module: str,
    doc: str | None,
    arguments: list[str],
    timed: Callable[..., list[dict[str, Any]]],
    sizes: Iterable[Size],
    title: str,
    field: str,
) -> int:
    """Time every size on a GPU, or a tiny one on a CPU. Write the report after each size."""
    options = measuring(f"python -m benchmarks.gpu.{module}", doc, arguments)
    report = {**measure.header(title, options.device), "cases": [], field: []}
    for size in sizes if options.device == "cuda" else [SMALL]:
        report[field] += timed(*size, options.device)
        if options.out:
            write(Path(options.out), report)
    return 0
