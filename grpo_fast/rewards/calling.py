"""Finding and calling a reward function, here or in a process of its own.

Only the standard library: `isolated.py` runs this very file as its child, which must start at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import importlib
import importlib.util
import inspect
import itertools
import json
import os
import select
import signal
import sys
from collections.abc import Callable, Mapping, Set
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from types import ModuleType
from typing import Any, NamedTuple

RewardFunction = Callable[..., Any]
Score = float | list[float]  # of a completion, or of each of its tokens
WRONG_LENGTH, NO_NUMBERS = "wrong_length", "not_a_number"  # reasons of a RewardFailure
LOADED = 0  # the number of the first request, which has the function loaded


class RewardFailure(RuntimeError):
    """A call that gave no rewards; `why` is the reason it is counted under."""

    def __init__(self, message: str, why: str = "error") -> None:
        super().__init__(message)
        self.why = why


def why_of(error: BaseException) -> str:
    if isinstance(error, TimeoutError):
        return "timeout"
    return error.why if isinstance(error, RewardFailure) else "error"


class Parameters(NamedTuple):
    """The columns that a function takes by name, and those that it needs."""

    takes: list[str] | None  # None: everything (`**columns`)
    needs: list[str]

    def select(self, columns: Mapping[str, Any]) -> dict[str, Any]:
        chosen = columns if self.takes is None else self.takes
        return {name: columns[name] for name in chosen if name in columns}


USUAL = Parameters(["prompts", "completions", "answers"], [])  # of a callable that does not tell


def parameters_of(function: RewardFunction) -> Parameters:
    """A function's parameters. Raises ValueError for one that cannot be given by its name."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return USUAL
    if any(p.kind is p.POSITIONAL_ONLY for p in parameters):
        raise ValueError("rewards: expected parameters that can be given by name, got one before /")
    by_name = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    needs = [p.name for p in by_name if p.default is p.empty]
    return Parameters(None if takes_all else [p.name for p in by_name], needs)


def import_function(path: str) -> RewardFunction:
    """The function at "package.module:function" or "file.py:function", or a ValueError."""
    module_name, colon, attribute = path.rpartition(":")
    if not (module_name and colon and attribute):
        expected = "expected 'package.module:function' or 'file.py:function'"
        raise ValueError(f"rewards: {expected}, got {path!r}")
    try:
        is_file = module_name.endswith(".py")
        module = _run_file(module_name) if is_file else importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # importing runs the module, which may raise anything
        failed = f"could not import {module_name!r} of {path!r}: {describe(error)}"
        raise ValueError(f"rewards: {failed}") from error
    function = getattr(module, attribute, None)
    if not callable(function):
        expected = f"a function {attribute!r} in {module_name}"
        raise ValueError(f"rewards: expected {expected}, found {text_of(function)}")
    return function


def _run_file(path: str) -> ModuleType:
    """The module in a file, which need not lie where modules are looked for."""
    path = os.path.abspath(os.path.expanduser(path))
    name = os.path.basename(path).removesuffix(".py")
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
    # Dataclasses, for one, look their module up; a module that is there already stays.
    sys.modules.setdefault(name, module)
    spec.loader.exec_module(module)  # type: ignore[union-attr]
    return module


def call(function: RewardFunction, count: int, arguments: dict[str, Any]) -> list[Score | str]:
    """Call the function for `count` completions: a number, or one per token, else a text, for each.

    Raises whatever the function raises, and a RewardFailure for anything that is not one value per
    completion in their order.
    """
    result = function(**arguments)
    if inspect.isawaitable(result):
        result = _awaited(result)
    return [_score_or_text(value) for value in _values(result, count)]


def describe(error: BaseException) -> str:
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
        said = f"expected a list of {count} numbers, the function returned {came}"
        raise RewardFailure(said, NO_NUMBERS)
    listed = list(itertools.islice(iterator, count + 1))  # it may be endless
    if len(listed) != count:
        number = len(listed) if len(listed) < count else "more"
        said = f"expected {count} rewards, the function returned {number}"
        raise RewardFailure(said, WRONG_LENGTH)
    return listed


def _score_or_text(value: Any) -> Score | str:
    values = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(values, (list, tuple)):
        return _number_or_text(values)
    numbers = [_number_or_text(item) for item in values]
    return next((item for item in numbers if isinstance(item, str)), numbers)  # type: ignore


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


def serve(path: str, pipe: Connection) -> None:
    """The child's loop: one JSON object in, one out. The first request loads the function."""
    sys.stdout = sys.stderr  # at once, in one order
    home = open_folder()
    function: RewardFunction | None = None
    with contextlib.suppress(EOFError):
        while True:
            request = json.loads(pipe.recv_bytes())
            message: dict[str, Any] = {"number": request["number"]}
            try:
                if function is None:
                    function = import_function(path)
                    message["parameters"] = parameters_of(function)
                else:
                    if home is not None:
                        os.fchdir(home)
                    message["rewards"] = call(function, request["count"], request["arguments"])
            except BaseException as error:  # a user's function may raise anything
                message |= {"error": describe(error), "why": why_of(error)}
            pipe.send_bytes(json.dumps(message).encode())


def _end_with_the_caller(lifeline: int) -> None:
    """Have the kernel kill this process group when the other end of the pipe `lifeline` is gone.

    A thread would need the interpreter lock, which a backtracking regular expression never gives
    back; PR_SET_PDEATHSIG watches a thread, not its process. Nobody writes to this pipe: what there
    is to read can only be the end.
    """
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([lifeline], [], [], 0)[0]:  # it went before the signal was asked for
        os._exit(1)


if __name__ == "__main__":
    handle, lifeline = map(int, sys.argv[2:])
    os.set_inheritable(handle, False)  # what the function starts gets no end of the pipe
    _end_with_the_caller(lifeline)
    serve(sys.argv[1], Connection(handle))
