"""Script that `test_two_processes.py` starts on two ranks. It runs trainers of other libraries."""

import os
import traceback
from pathlib import Path
from typing import Any

from torch import distributed

from tests.integrations import two_plain, two_trl, two_verl

# `two_plain` must be last. It imports Lightning, and a process that has imported Lightning makes
# verl treat every module as an abstract class.
SECTIONS = (two_trl, two_verl, two_plain)


def results_of(folder: str) -> dict[str, Any]:
    """Run all cases, and return the result or the traceback of each case on this rank.

    The key "missing" holds the import error of each trainer that is not installed.
    """
    os.environ["LOCAL_RANK"] = str(distributed.get_rank())  # torchrun would set it
    found: dict[str, Any] = {"missing": []}
    for section in SECTIONS:
        try:
            for name, work in section.cases(Path(folder)):
                try:
                    found[name] = work()
                except Exception as error:
                    if is_missing(error):
                        raise
                    found[name] = {"error": traceback.format_exc()}
        except ModuleNotFoundError as error:
            if not is_missing(error):
                raise
            found["missing"].append(str(error))
    return found


def is_missing(error: Exception) -> bool:
    """Return True if the error means that a trainer is not installed."""
    return isinstance(error, ModuleNotFoundError) and "make trainers" in str(error)
