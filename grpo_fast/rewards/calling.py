"""Import and call a reward function, in this process or in a worker process.

`isolated.py` runs this file as the worker. The file imports only the standard library, so that a
worker starts in a fraction of a second.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import functools
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
else:  # in a worker, import only conventions.py, because the package imports torch
    sys.path.insert(0, os.path.dirname(__file__))
    import conventions

    sys.path.pop(0)
    del sys.modules["conventions"]  # the user may have a module with this name

RewardFunction = Callable[..., Any]
# Reward of a completion, or of each of its tokens. None: the function does not apply to it.
Score = float | list[float] | None
WRONG_LENGTH, NO_NUMBERS = "wrong_length", "not_a_number"  # values of RewardFailure.why


class RewardFailure(RuntimeError):
    """Exception for a failed call of a reward function.

    Args:
        message: the error message.
        why: the reason in the metrics. For example, `rewards/<fn>/failed/timeout` counts the
            samples that have no reward for the reason "timeout".
    """

    def __init__(self, message: str, why: str = "error") -> None:
        super().__init__(message)
        self.why = why


def import_function(path: str) -> RewardFunction:
    """Import a function, given as "package.module:function" or "file.py:function".

    Raises:
        ValueError: there is no function at the path.
    """
    module_name, _, attribute = path.rpartition(":")
    if not (module_name and attribute):
        expected = "expected 'package.module:function' or 'file.py:function'"
        raise ValueError(f"rewards: {expected}, got {path!r}")
    is_file = module_name.endswith(".py")
    if is_file and not os.path.exists(os.path.expanduser(module_name)):
        raise ValueError(f"rewards: no such file: {module_name!r}")
    load = _run_file if is_file else importlib.import_module
    try:
        module = load(module_name)
    except (Exception, SystemExit) as error:  # the user's module may raise anything
        message = f"could not import {module_name!r} of {path!r}: {describe(error)}"
        raise ValueError(f"rewards: {message}") from error
    function = getattr(module, attribute, None)
    if not callable(function):
        expected = f"expected a function {attribute!r} in {module_name}"
        known = [name for name, value in vars(module).items() if inspect.isfunction(value)]
        came = f"got {text_of(function)}" if function is not None else "found no such name"
        raise ValueError(f"rewards: {expected}, {came}; functions: {', '.join(known) or 'none'}")
    return function


def _run_file(path: str) -> ModuleType:
    path = os.path.abspath(os.path.expanduser(path))
    name = os.path.basename(path).removesuffix(".py")
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
    # Register the module, because dataclasses look it up by its name. Do not replace a different
    # module with the same name.
    sys.modules.setdefault(name, module)
    spec.loader.exec_module(module)  # type: ignore[union-attr]
    return module


def call(function: RewardFunction, count: int, arguments: dict[str, Any]) -> list[Score | str]:
    """Call a reward function and check its result.

    Args:
        function: the reward function, or a functools.partial that binds its options. It may return
            an awaitable.
        count: number of completions.
        arguments: keyword arguments of the call.

    Returns:
        For each completion a number, a list of numbers (one per token), or None if the function
        does not apply. Any other value is replaced by a string that describes it.

    Raises:
        RewardFailure: the function did not return one value per completion.
        BaseException: an error of any class that the function raised.
    """
    # A column of the data must not replace an option that has the same name.
    options = function.keywords if isinstance(function, functools.partial) else {}
    result = function(**{**arguments, **options})
    if inspect.isawaitable(result):
        result = _awaited(result)
    return [_score_or_text(value) for value in _values(result, count)]


def why_of(error: BaseException) -> str:
    """Return the reason in the metrics for the samples of a call that failed with this error."""
    if isinstance(error, RewardFailure):
        return error.why
    return "timeout" if isinstance(error, TimeoutError) else "error"


def describe(error: BaseException) -> str:
    if isinstance(error, RewardFailure):  # its message needs no class name
        return str(error)
    return f"{type(error).__name__}: {text_of(error)}"


def text_of(value: Any, longest: int = 500) -> str:
    """Return the beginning of str(value), or a placeholder if __str__ raises an error."""
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
        return asyncio.run(wait())  # in this thread, so that Ctrl-C cancels it
    # This thread already runs an event loop, for example in a notebook. Use a different thread.
    with ThreadPoolExecutor(max_workers=1) as pool:
        return pool.submit(asyncio.run, wait()).result()


def _values(result: Any, count: int) -> list[Any]:
    """Return the result of a function as a list of `count` values, or raise a RewardFailure."""
    must = f"a reward function must return one value per completion: expected {count} values"
    values = result.tolist() if hasattr(result, "tolist") else result
    if isinstance(values, numbers.Number):
        raise RewardFailure(f"{must}, got one number", WRONG_LENGTH)
    # Refuse dicts and sets, because their order does not say which completion a value belongs to.
    is_unordered = isinstance(values, (str, bytes, bytearray, Set)) or hasattr(values, "keys")
    if is_unordered or not hasattr(values, "__iter__"):
        raise RewardFailure(f"{must} in a list, got {type(result).__name__}", NO_NUMBERS)
    listed = list(itertools.islice(values, count + 1))  # an iterator may be endless
    if len(listed) != count:
        got = len(listed) if len(listed) < count else "more"
        raise RewardFailure(f"{must}, got {got}", WRONG_LENGTH)
    return listed


def _score_or_text(value: Any) -> Score | str:
    values = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(values, (list, tuple)):
        scores = [_number_or_text(item) for item in values]
        return next((item for item in scores if isinstance(item, str)), scores)  # type: ignore
    return None if values is None else _number_or_text(values)


def _number_or_text(value: Any) -> float | str:
    if not isinstance(value, (str, bytes, bytearray)):  # float("1") would accept a string
        with contextlib.suppress(Exception):
            return float(value)
    return text_of(value, 60)


# ------------------------------------------------------------------------------------ the worker
def serve(path: str, pipe: Connection) -> None:
    """Answer JSON requests from the pipe until the caller closes it.

    The first request imports the function at `path`. All later requests call the function.

    Raises:
        EOFError: the caller has closed the pipe.
    """
    loaded: conventions.Loaded | None = None
    while True:
        request = json.loads(pipe.recv_bytes())
        try:
            if loaded is None:
                loaded = conventions.load(import_function(path), **request)
                per_sample = conventions.is_per_sample(loaded.function)
                reply = {**loaded._asdict(), "function": None, "per_sample": per_sample}
            else:
                reply = _reply(loaded, **request)
        except BaseException as error:  # a user's function may raise anything
            reply = {"error": describe(error), "why": why_of(error)}
        pipe.send_bytes(json.dumps(reply, default=text_of).encode())


def _reply(
    loaded: conventions.Loaded, count: int, arguments: dict[str, Any], state: dict[str, Any] | None
) -> dict[str, Any]:
    log = conventions.RunLog()
    if state is not None:
        arguments |= loaded.parameters.select(log.objects(state))
    scores = call(loaded.function, count, arguments)
    return {"scores": scores, "extra": log.extra, "metrics": log.metrics}


def _end_with_the_caller(lifeline: int) -> None:
    """Make the kernel kill this process group when the caller ends.

    `lifeline` is the read end of a pipe that closes when the caller ends. A thread that watches the
    pipe would need the interpreter lock, which a backtracking regular expression never releases.
    PR_SET_PDEATHSIG is unsuitable, because it reacts to the end of a thread of the caller and not
    to the end of its process.
    """
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
    # If the pipe was closed before O_ASYNC was set, the kernel sends no signal. Exit here.
    if select.select([lifeline], [], [], 0)[0]:
        os._exit(1)


if __name__ == "__main__":
    handle, lifeline = map(int, sys.argv[2:])
    os.set_inheritable(handle, False)  # programs that the function starts must not get the pipe
    _end_with_the_caller(lifeline)
    with contextlib.suppress(EOFError):  # the caller has closed the pipe
        serve(sys.argv[1], Connection(handle))
