"""Import and call a reward function, in this process or in a worker.

`isolated.py` runs this file as the worker. It imports only the standard library so that a worker
starts in a fraction of a second.
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
import numbers
import os
import select
import signal
import sys
from collections.abc import Callable, Set
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING or __name__ != "__main__":
    from grpo_fast.rewards import conventions
else:  # a worker: it imports the file next to this one, and nothing else of the package
    sys.path.insert(0, os.path.dirname(__file__))
    import conventions

    sys.path.pop(0)
    del sys.modules["conventions"]  # a user's module may have this name

RewardFunction = Callable[..., Any]
Score = float | list[float] | None  # of a completion, or of each of its tokens; None: not for it
WRONG_LENGTH, NO_NUMBERS = "wrong_length", "not_a_number"  # reasons of a RewardFailure


class RewardFailure(RuntimeError):
    """A call that returned no rewards; `why` is the reason that the metrics count."""

    def __init__(self, message: str, why: str = "error") -> None:
        super().__init__(message)
        self.why = why


def why_of(error: BaseException) -> str:
    if isinstance(error, TimeoutError):
        return "timeout"
    return getattr(error, "why", "error") if isinstance(error, RewardFailure) else "error"


def import_function(path: str) -> RewardFunction:
    """Return the function at "package.module:function" or "file.py:function"."""
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
    path = os.path.abspath(os.path.expanduser(path))
    name = os.path.basename(path).removesuffix(".py")
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
    # Dataclasses look up their module by name. A module of that name that exists stays.
    sys.modules.setdefault(name, module)
    spec.loader.exec_module(module)  # type: ignore[union-attr]
    return module


def call(function: RewardFunction, count: int, arguments: dict[str, Any]) -> list[Score | str]:
    """Call the function for `count` completions.

    Returns:
        For each completion a number, a list of numbers (one per token), None if the function does
        not apply, or a text that describes what was returned instead.

    Raises:
        RewardFailure: the function did not return one value per completion.
        BaseException: whatever the function raises.
    """
    result = function(**arguments)
    if inspect.isawaitable(result):
        result = _awaited(result)
    return [_score_or_text(value) for value in _values(result, count)]


def describe(error: BaseException) -> str:
    if isinstance(error, RewardFailure):  # its message is a sentence of ours
        return str(error)
    return f"{type(error).__name__}: {text_of(error)}"


def text_of(value: Any, longest: int = 500) -> str:
    """Return the beginning of str(value), which may raise anything for a user's class."""
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
    must = "a reward function must return one value per completion"
    values = result.tolist() if hasattr(result, "tolist") else result
    if isinstance(values, numbers.Number):
        raise RewardFailure(f"{must}: expected {count} values, got one number", WRONG_LENGTH)
    # The order of a dict or a set does not say which completion a value belongs to.
    is_unordered = isinstance(values, (str, bytes, bytearray, Set)) or hasattr(values, "keys")
    if is_unordered or not hasattr(values, "__iter__"):
        came = type(result).__name__
        raise RewardFailure(f"{must}: expected a list of {count} numbers, got {came}", NO_NUMBERS)
    listed = list(itertools.islice(values, count + 1))  # an iterator may be endless
    if len(listed) != count:
        came = str(len(listed)) if len(listed) < count else "more"
        raise RewardFailure(f"{must}: expected {count} values, got {came}", WRONG_LENGTH)
    return listed


def _score_or_text(value: Any) -> Score | str:
    values = value.tolist() if hasattr(value, "tolist") else value
    if values is None:
        return None
    if not isinstance(values, (list, tuple)):
        return _number_or_text(values)
    scores = [_number_or_text(item) for item in values]
    return next((item for item in scores if isinstance(item, str)), scores)  # type: ignore


def _number_or_text(value: Any) -> float | str:
    if not isinstance(value, (str, bytes, bytearray)):  # float() would read numbers out of these
        with contextlib.suppress(Exception):
            return float(value)
    return text_of(value, 60)


# ------------------------------------------------------------------------------------ the worker
def serve(path: str, pipe: Connection) -> None:
    """Read one JSON object per request and write one per reply. The first request loads the
    function.
    """
    loaded: conventions.Loaded | None = None
    while True:
        try:
            request = json.loads(pipe.recv_bytes())
        except EOFError:
            return
        answer: dict[str, Any] = {}
        try:
            if loaded is None:
                loaded = conventions.load(import_function(path), **request)
                answer = {**loaded._asdict(), "function": None}
                answer["per_sample"] = conventions.is_per_sample(loaded.function)
            else:
                answer = _answer(loaded, **request)
        except BaseException as error:  # a user's function may raise anything
            answer = {"error": describe(error), "why": why_of(error)}
        pipe.send_bytes(json.dumps(answer, default=text_of).encode())


def _answer(
    loaded: conventions.Loaded, count: int, arguments: dict[str, Any], state: dict[str, Any] | None
) -> dict[str, Any]:
    log = conventions.RunLog()
    if state is not None:
        arguments |= loaded.parameters.select(log.objects(state))
    scores = call(loaded.function, count, {**arguments, **loaded.options})
    return {"scores": scores, "extra": log.extra, "metrics": log.metrics}


def _end_with_the_caller(lifeline: int) -> None:
    """Have the kernel kill this process group when the caller's end of the pipe closes.

    A thread would need the interpreter lock, which a backtracking regular expression never
    releases. PR_SET_PDEATHSIG watches a thread of the caller instead of its process.
    """
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([lifeline], [], [], 0)[0]:  # it closed before the signal was requested
        os._exit(1)


if __name__ == "__main__":
    handle, lifeline = map(int, sys.argv[2:])
    os.set_inheritable(handle, False)  # programs that the function starts do not hold the pipe
    _end_with_the_caller(lifeline)
    serve(sys.argv[1], Connection(handle))
