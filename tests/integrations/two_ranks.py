"""Other people's trainers over two processes: a job of `tests.train.ranks`."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.integrations import two_openrlhf, two_plain, two_trl, two_verl

# One that is not installed has no results. Lightning is the last: once it is imported, verl takes
# every module for an abstract class.
SECTIONS = (two_trl, two_verl, two_openrlhf, two_plain)


def results_of(folder: str) -> dict[str, Any]:
    """Case → its result on this rank, or what went wrong in it."""
    as_torchrun = {"LOCAL_RANK": os.environ["RANK"], "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0"}
    os.environ |= as_torchrun
    found: dict[str, Any] = {}
    for section in SECTIONS:
        collect(section.cases(Path(folder)), found)
    return found


def collect(cases: Iterator[tuple[str, Callable[[], Any]]], found: dict[str, Any]) -> None:
    """The results of a section's cases; one that fails has its error for a result."""
    try:
        for name, work in cases:
            try:
                found[name] = work()
            except Exception as error:
                if is_missing(error):
                    raise
                found[name] = {"error": traceback.format_exc()}
    except ModuleNotFoundError as error:
        if not is_missing(error):
            raise
        found["missing"] = [*found.get("missing", []), str(error)]


def is_missing(error: Exception) -> bool:
    """Whether a trainer is not installed, and its section has no results."""
    return isinstance(error, ModuleNotFoundError) and "make trainers" in str(error)
