"""Import, adapt and call reward functions of grpo_fast, TRL, verl and OpenRLHF.

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
import math
import os
import select
import signal
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from multiprocessing.connection import Connection
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

RewardFunction = Callable[..., Any]
Score = float | None  # None: the function does not apply to the completion
Reply = tuple[list[Score | str], str]  # see `Function.call`
WRONG_LENGTH, NO_NUMBERS = "wrong_length", "not_a_number"  # values of RewardFailure.why
OURS, TRL, VERL, OPENRLHF = CONVENTIONS = ("grpo_fast", "trl", "verl", "openrlhf")
# Columns that a function for grpo_fast can request, in addition to those of the data.
SAMPLED = ("prompts", "completions", "completion_ids", "completion_lengths", "prefills")
TRAINER_STATE = "trainer_state"  # object that TRL passes with its columns
OPENRLHFS = ("queries", "prompts", "labels")
# Fields of TRL's `trainer_state` that reward functions read.
STATE = {"global_step": 0, "max_steps": 0, "epoch": 0.0, "log_history": [],
         "is_local_process_zero": True, "is_world_process_zero": True}  # fmt: skip
LARGEST = 3.4e38  # larger numbers would be infinite in fp32


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


# --------------------------------------------------------------------------- import a function
def import_function(path: str) -> Callable[..., Any]:
    """Import a function, given as "package.module:function" or "file.py:function".

    Modules next to a file can be imported by the file.

    Raises:
        ValueError: there is no function at the path.
    """
    module_name, _, attribute = path.rpartition(":")
    if not (module_name and attribute):
        expected = "expected 'package.module:function' or 'file.py:function'"
        raise ValueError(f"rewards: {expected}, got {path!r}")
    try:
        is_file = module_name.endswith(".py")
        module = (_run_file if is_file else importlib.import_module)(module_name)
    except (Exception, SystemExit) as error:  # the user's module may raise anything
        message = f"could not import {module_name!r} of {path!r}: {describe(error)}"
        raise ValueError(f"rewards: {message}") from error
    function = getattr(module, attribute, None)
    if not callable(function):
        known = [name for name, value in vars(module).items() if inspect.isfunction(value)]
        expected = f"expected a function {attribute!r} in {module_name}"
        raise ValueError(f"rewards: {expected}, got only: {', '.join(known) or 'none'}")
    return function


def _run_file(path: str) -> ModuleType:
    folder, base = os.path.split(os.path.abspath(os.path.expanduser(path)))
    name = base.removesuffix(".py")
    spec = importlib.util.spec_from_file_location(name, os.path.join(folder, base))
    module = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
    # Register the module, because dataclasses look it up by its name. Do not replace a different
    # module with the same name.
    sys.modules.setdefault(name, module)
    # Put the folder first, as Python does for a script. Later, it must not hide other modules.
    sys.path.insert(0, folder)
    try:
        spec.loader.exec_module(module)  # type: ignore[union-attr]
    finally:
        sys.path.remove(folder)
        sys.path.append(folder)
    return module


# ------------------------------------------------------------------ adapt a function's arguments
class Signature(NamedTuple):
    """Columns that a reward function accepts.

    Attributes:
        takes: names of the columns that the function accepts.
        needs: names of the columns that the function requires.
        takes_all: True for a function with `**columns`, which accepts all columns.
    """

    takes: Sequence[str]
    needs: Sequence[str]
    takes_all: bool

    def select(self, columns: Mapping[str, Any]) -> dict[str, Any]:
        """Return the columns that the function accepts."""
        return {name: x for name, x in columns.items() if self.takes_all or name in self.takes}


def signature_of(function: RewardFunction) -> Signature:
    """Return the columns that a function accepts and requires."""
    parameters = inspect.signature(function).parameters.values()
    by_name = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    needs = [p.name for p in by_name if p.default is p.empty]
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    return Signature([p.name for p in by_name], needs, takes_all)


class Function:
    """Reward function of any convention that runs in this process.

    Args:
        function: a function, or a class whose instances can be called.
        convention: one of CONVENTIONS.
        options: arguments of every call, or of the constructor of a class.

    Raises:
        ValueError: the function does not accept an option.
    """

    def __init__(
        self, function: RewardFunction, convention: str, options: Mapping[str, Any]
    ) -> None:
        try:
            inspect.signature(function).bind_partial(**options)
        except TypeError as error:
            raise ValueError(f"rewards: options: {error}") from None
        self.function = functools.partial(function, **options)
        if inspect.isclass(function):
            self.function = functools.partial(self.function())
        self.convention = convention
        self.signature = signature_of(self.function)
        if convention == OPENRLHF:  # passes its arguments by position
            self.signature = Signature(OPENRLHFS, OPENRLHFS, False)

    def call(
        self, count: int, columns: Mapping[str, Any], state: Mapping[str, Any] | None = None
    ) -> Reply:
        """Call the function with lists as arguments and check its result.

        Args:
            count: number of completions.
            columns: the columns that the function accepts.
            state: fields of TRL's `trainer_state`.

        Returns:
            A list with the score of each completion, or with the reason why it has no score, and a
            description of the first value that is not a score. It is "" if all values are scores.

        Raises:
            RewardFailure: the function did not return one value per completion.
        """
        # 1. Pass the state of TRL. A column must not replace an option of the same name.
        if self.convention == TRL:
            progress = SimpleNamespace(**{**STATE, **(state or {})})
            columns = {**columns, **self.signature.select({TRAINER_STATE: progress})}
        columns = {name: x for name, x in columns.items() if name not in self.function.keywords}
        # 2. Call the function.
        result: Any
        if self.convention == VERL:  # scores one completion
            values = zip(*columns.values(), strict=True)
            rows = [dict(zip(columns, row, strict=True)) for row in values]
            result = _in_a_loop([functools.partial(self.function, **row) for row in rows])
        elif self.convention == OPENRLHF:
            given = [columns[name] for name in OPENRLHFS]
            [result] = _in_a_loop([functools.partial(self.function, *given)])
            result = result["rewards"] if isinstance(result, Mapping) else result
        else:  # is called outside of an event loop, because it may call asyncio.run
            result = self.function(**columns)
            if inspect.isawaitable(result):
                [result] = _in_a_loop([lambda: result])
        # 3. Check the values.
        if isinstance(result, BaseException):
            raise result
        checked = [_checked(value) for value in _values(result, count)]
        notes = [note for _, note in checked if note]
        return [score for score, _ in checked], notes[0] if notes else ""


def why_of(error: BaseException) -> str:
    """Return the reason in the metrics for the samples of a call that failed with this error."""
    if isinstance(error, RewardFailure):
        return error.why
    return "timeout" if isinstance(error, TimeoutError) else "error"


def describe(error: BaseException) -> str:
    if isinstance(error, RewardFailure):  # its message needs no class name
        return str(error)
    text = "no text"
    with contextlib.suppress(Exception):  # a user's __str__ may raise anything
        text = str(error)[:500]
    return f"{type(error).__name__}: {text}"


def _in_a_loop(calls: list[Callable[[], Any]]) -> list[Any]:
    """Call functions in an event loop, in which they may start tasks, and await their results.

    If a function raises an exception, its result is the exception.
    """

    async def one(call: Callable[[], Any]) -> Any:
        result = call()
        return await result if inspect.isawaitable(result) else result

    async def wait() -> list[Any]:
        return await asyncio.gather(*map(one, calls), return_exceptions=True)

    return asyncio.run(wait())


def _values(result: Any, count: int) -> list[Any]:
    """Return the result of a function as a list of `count` values, or raise a RewardFailure."""
    values = result.tolist() if hasattr(result, "tolist") else result
    # The order of a dict or set does not say which completion a value belongs to.
    is_listed = isinstance(values, Iterable) and not isinstance(values, (str, bytes, Mapping, Set))
    listed = list(itertools.islice(values, count + 1)) if is_listed else []
    if len(listed) != count or not is_listed:
        got = f"{'more' if len(listed) > count else len(listed)} in a {type(result).__name__}"
        expected = f"expected {count} values in a list"
        message = f"a reward function must return one value per completion: {expected}, got {got}"
        raise RewardFailure(message, WRONG_LENGTH)
    return listed


def _checked(value: Any) -> tuple[Score | str, str]:
    """Check one value that a reward function returned for a completion.

    Returns:
        The reward, or the reason why the completion has none, and a description of a bad value,
        which is empty for a good value.
    """
    if value is None:
        return None, ""
    if isinstance(value, BaseException):  # of a function that scores one completion
        return why_of(value), describe(value)
    number = math.nan
    with contextlib.suppress(Exception):
        number = float(value["score"] if isinstance(value, Mapping) else value)
    if not isinstance(value, (str, bytes)) and abs(number) <= LARGEST:
        return number, ""
    return NO_NUMBERS, f"not a finite number: {value!r:.60}"


# ------------------------------------------------------------------------------------ the worker
def serve(pipe: Connection) -> None:
    """Answer JSON requests from the pipe until the caller closes it.

    The first request is the list [path, convention, options] of a function, and the reply is its
    signature. Each later request has the arguments of `Function.call`.

    Raises:
        EOFError: the caller has closed the pipe.
    """
    function: Function | None = None
    while True:
        request = json.loads(pipe.recv_bytes())
        try:
            if function is None:
                path, *rest = request
                function = Function(import_function(path), *rest)
                reply: Any = function.signature
            else:
                reply = function.call(*request)
        except BaseException as error:  # a user's function may raise anything
            reply = {"error": describe(error), "why": why_of(error)}
        pipe.send_bytes(json.dumps(reply, default=str).encode())


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
    handle, lifeline = map(int, sys.argv[1:])
    os.set_inheritable(handle, False)  # programs that the function starts must not get the pipe
    _end_with_the_caller(lifeline)
    with contextlib.suppress(EOFError):  # the caller has closed the pipe
        serve(Connection(handle))
