"""Finding and calling a reward function, here or in a process of its own.

Only the standard library: `isolated.py` runs this very file as its child, which must start in no
time and must not load torch unless the user's function does.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import importlib
import inspect
import itertools
import json
import os
import select
import signal
import sys
from collections.abc import Callable, Set
from concurrent.futures import ThreadPoolExecutor
from typing import Any

RewardFunction = Callable[..., Any]
LOADED = 0  # the number of the first answer, which no request asked for


def import_function(path: str) -> RewardFunction:
    """The function at "package.module:function". Raises ValueError when there is none."""
    module_name, colon, attribute = path.partition(":")
    if not (module_name and colon and attribute):
        raise ValueError(f"rewards: expected 'package.module:function', got {path!r}")
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # importing runs the module, which may raise anything
        failed = f"could not import {module_name!r} of {path!r}: {describe(error)}"
        raise ValueError(f"rewards: {failed}") from error
    function = getattr(module, attribute, None)
    if not callable(function):
        expected = f"a function {attribute!r} in {module_name}"
        raise ValueError(f"rewards: expected {expected}, found {text_of(function)}")
    return function


def call(function: RewardFunction, **arguments: Any) -> list[float | str]:
    """What the function returns for each completion: a float, or a text where that is no number.

    Awaits an awaitable. Raises whatever the function raises, and ValueError for anything that is
    not one value per completion in their order.
    """
    count = len(arguments["completions"])  # before the call: the lists are the function's to change
    result = function(**arguments)
    if inspect.isawaitable(result):
        result = _awaited(result)
    return [_number_or_text(value) for value in _values(result, count)]


def describe(error: BaseException) -> str:
    """The error's type and message, also where the message cannot be had."""
    return f"{type(error).__name__}: {text_of(error)}"


def text_of(value: Any, longest: int = 500) -> str:
    """The beginning of str(value); a user's class may raise anything there."""
    try:
        return str(value)[:longest]
    except BaseException:
        return f"<{type(value).__name__} without a text>"


def _awaited(awaitable: Any) -> Any:
    async def wait() -> Any:
        return await awaitable

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(wait())  # in this thread: Ctrl-C cancels it
    # The caller (a notebook) runs a loop in this thread.
    with ThreadPoolExecutor(max_workers=1) as pool:
        return pool.submit(asyncio.run, wait()).result()


def _values(result: Any, count: int) -> list[Any]:
    values = result.tolist() if hasattr(result, "tolist") else result
    iterator = None
    # The order of a dict or a set does not say which completion a value belongs to.
    if not isinstance(values, (str, bytes, bytearray, Set)) and not hasattr(values, "keys"):
        with contextlib.suppress(TypeError):
            iterator = iter(values)
    if iterator is None:
        came = type(result).__name__
        raise ValueError(f"expected a list of {count} numbers, the function returned {came}")
    listed = list(itertools.islice(iterator, count + 1))  # it may be endless
    if len(listed) != count:
        number = len(listed) if len(listed) < count else "more"
        raise ValueError(f"expected {count} rewards, the function returned {number}")
    return listed


def _number_or_text(value: Any) -> float | str:
    if not isinstance(value, (str, bytes, bytearray)):  # float() would read numbers out of these
        with contextlib.suppress(Exception):
            return float(value)
    return text_of(value, 60)


def open_folder() -> int | None:
    """The working folder, for `os.fchdir`; None where it cannot be opened (another user's)."""
    try:
        return os.open(os.curdir, os.O_RDONLY)
    except OSError:
        return None


def serve(path: str) -> None:
    """The child's loop: one JSON line in, one out with its number; one before: was `path` found?"""
    requests = os.fdopen(os.dup(0), encoding="utf-8")
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    # The function, and what it starts, finds nothing on stdin and prints to stderr.
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    home = open_folder()
    function: RewardFunction | None = None
    for line in itertools.chain([json.dumps({"number": LOADED})], requests):
        request = json.loads(line)
        message: dict[str, Any] = {"number": request["number"]}
        try:
            if function is None:
                function = import_function(path)
            else:
                if home is not None:
                    os.fchdir(home)
                message["rewards"] = call(function, **request["arguments"])
        except BaseException as error:  # a user's function may raise anything
            message["error"] = describe(error)
        answers.write(json.dumps(message) + "\n")
        answers.flush()


def _end_with_the_caller(lifeline: int) -> None:
    """Have the kernel kill this process group when the other end of the pipe `lifeline` is gone.

    A thread that waits for that would need the interpreter lock, which a backtracking regular
    expression never gives back; PR_SET_PDEATHSIG watches the thread that started this process, not
    its process. The signal says that there is something to read, which can only be the end: nobody
    writes to this pipe.
    """
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([lifeline], [], [], 0)[0]:  # it went before the signal was asked for
        os._exit(1)


if __name__ == "__main__":
    _end_with_the_caller(int(sys.argv[2]))
    serve(sys.argv[1])
