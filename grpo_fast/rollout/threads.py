"""Functions on threads that do not keep the process from exiting."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

Result = TypeVar("Result")


def started(work: Callable[[], Result]) -> Future[Result]:
    """Run a function on a daemon thread, and return a future of its result.

    A ThreadPoolExecutor would keep the process from exiting while a thread waits for a server.
    """
    future: Future[Result] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future
