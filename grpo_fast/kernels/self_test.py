"""Helper that runs the self-test of a kernel independently of the caller's torch settings."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

R = TypeVar("R")


def in_fresh_thread(test: Callable[[], R]) -> R:
    """Run a test function in a new thread and return its result.

    Autocast, inference mode, the default device, dispatch modes and the hooks of activation
    checkpointing are thread-local. In a new thread, they have torch's default values.
    """
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(test).result()
