"""Where self-tests of kernels run: out of reach of the settings of the call that comes first."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Result = TypeVar("Result")


def apart(test: Callable[[], Result]) -> Result:
    """Run a test in a thread of its own and return its result, which is then kept for good.

    torch keeps autocast, inference mode, default devices, dispatch modes and the hooks of a
    checkpointed layer (which would run the layer again in the middle of the test) per thread.
    """
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(test).result()
