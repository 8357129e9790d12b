"""Job of `test_two_processes.py`, which torchrun starts on two ranks.

The job runs other trainers. Each rank writes FOLDER/rank<r>.json, a dictionary from the name of
each case to its result or error.
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

# The sections run in this order. Lightning must be last, because after its import, verl treats
# every module as an abstract class.
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
    """Run all cases of a section, and add the result or the traceback of each case to `found`."""
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
    """Return True if an error says that a trainer is not installed."""
    return isinstance(error, ModuleNotFoundError) and "make trainers" in str(error)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
