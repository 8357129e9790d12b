"""Where self-tests of kernels run: out of reach of the settings of the call that comes first."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

R = TypeVar("R")


def in_fresh_thread(test: Callable[[], R]) -> R:
    """The result of a test in a thread of its own: autocast, inference mode, default devices,
    dispatch modes and checkpointing's hooks belong to a thread.
    """
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(test).result()
