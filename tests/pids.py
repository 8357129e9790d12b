"""Helpers for processes that a test did not start itself."""

import time
from collections.abc import Callable
from pathlib import Path


def alive(pid: int) -> bool:
    """Return whether a process runs. A process that ended but was not reaped does not run."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)
