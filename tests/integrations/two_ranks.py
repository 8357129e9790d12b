"""Other people's trainers over two processes, started by test_two_processes with torchrun.

Each rank writes FOLDER/rank<r>.json: case → result, or what went wrong in it.
"""

import datetime
import json
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from tests.integrations import two_plain, two_trl, two_verl

# One that is not installed has no results. Lightning is the last: once it is imported, verl takes
# every module for an abstract class.
SECTIONS = (two_trl, two_verl, two_plain)


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    rank, found = distributed.get_rank(), {}
    try:
        for section in SECTIONS:
            collect(section.cases(folder), found)
    finally:
        (folder / f"rank{rank}.json").write_text(json.dumps(found))
    distributed.destroy_process_group()


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


if __name__ == "__main__":
    main(Path(sys.argv[1]))
