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
import numbers
import os
import select
import signal
import struct
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Set
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

RewardFunction = Callable[..., Any]
# Reward of a completion, or of each of its tokens. None: the function does not apply to it.
Score = float | list[float] | None
Modules = dict[str, ModuleType]  # the modules of reward files, by path
WRONG_LENGTH, NO_NUMBERS = "wrong_length", "not_a_number"  # values of RewardFailure.why
OURS, TRL, VERL, OPENRLHF = CONVENTIONS = ("grpo_fast", "trl", "verl", "openrlhf")
# Columns that a function for grpo_fast can request, in addition to those of the data.
SAMPLED = ("prompts", "completions", "completion_ids", "completion_lengths", "prefills")
# Parameters by which a convention is recognised, because no other convention has them.
ONLY_OURS = ("answers", "completion_lengths", "prefills")
ONLY_TRL = ("trainer_state", "log_extra", "log_metric")
VERLS = ("data_source", "solution_str", "ground_truth", "extra_info")
OPENRLHFS = ("queries", "prompts", "labels")
# Fields of TRL's `trainer_state` that reward functions read.
STATE = {"global_step": 0, "max_steps": 0, "epoch": 0.0, "log_history": [],
         "is_local_process_zero": True, "is_world_process_zero": True}  # fmt: skip


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
def import_function(path: str, modules: Modules | None = None) -> RewardFunction:
    """Import a function, given as "package.module:function" or "file.py:function".

    Args:
        path: the path. Modules next to the file can be imported by the file.
        modules: modules of files that were already imported, to which the file's module is added.
            Functions of one file then share its module.

    Raises:
        ValueError: there is no function at the path.
    """
    module_name, _, attribute = path.rpartition(":")
    if not (module_name and attribute):
        expected = "expected 'package.module:function' or 'file.py:function'"
        raise ValueError(f"rewards: {expected}, got {path!r}")
    file = os.path.abspath(os.path.expanduser(module_name))
    is_file = module_name.endswith(".py")
    if is_file and not os.path.exists(file):
        raise ValueError(f"rewards: no such file: {module_name!r}")
    modules = {} if modules is None else modules
    try:
        if file not in modules:
            modules[file] = _run_file(file) if is_file else importlib.import_module(module_name)
        module = modules[file]
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
    folder, base = os.path.split(path)
    name = base.removesuffix(".py")
    spec = importlib.util.spec_from_file_location(name, path)
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
        if folder not in sys.path:
            sys.path.append(folder)
    return module


# ------------------------------------------------------------------ adapt a function's arguments
class Signature(NamedTuple):
    """Columns and calling convention of a reward function.

    Attributes:
        takes: names of the columns that the function accepts.
        needs: names of the columns that the function requires.
        takes_all: True for a function with `**columns`, which accepts all columns.
        convention: one of CONVENTIONS.
        per_sample: True if the function has a true attribute `per_sample`. With this attribute, it
            declares that each value depends on only one completion. If a call of it fails, it is
            called again for each sample. Other functions are not called again.
        is_unsure: True if the convention was detected, and the function has `**columns`. With a
            parameter `answers`, it fits our convention and TRL's. If the data has a column
            `answers`, TRL passes this column, and we pass the gold answers.
    """

    takes: list[str]
    needs: list[str]
    takes_all: bool
    convention: str = OURS
    per_sample: bool = False
    is_unsure: bool = False

    def select(self, columns: Mapping[str, Any]) -> dict[str, Any]:
        """Return the columns that the function accepts."""
        return {name: x for name, x in columns.items() if self.takes_all or name in self.takes}


def signature_of(function: RewardFunction) -> Signature:
    """Return the columns that a function accepts and requires.

    Raises:
        ValueError: a parameter is positional-only, or the function has no signature.
    """
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # for example a function of a C++ extension
        got = "got one without a signature; write a Python function that calls it"
        raise ValueError(f"rewards: expected a function with named parameters, {got}") from None
    if any(p.kind is p.POSITIONAL_ONLY for p in parameters):
        raise ValueError("rewards: expected parameters that can be given by name, got one before /")
    by_name = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    needs = [p.name for p in by_name if p.default is p.empty]
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    return Signature([p.name for p in by_name], needs, takes_all)


def convention_of(signature: Signature) -> str:
    """Return OURS or TRL, depending on the parameters of a function.

    A function with `**kwargs` is assumed to be written for TRL, which passes all columns to every
    function.

    Raises:
        ValueError: the parameters mix two conventions, or belong to verl or OpenRLHF. The
            configuration must then name the convention.
    """
    for name, word in (("solution_str", VERL), ("queries", OPENRLHF)):
        if name in signature.takes:
            conflict = f"{name!r} is a parameter of {word}'s convention"
            raise ValueError(f"rewards: {conflict}; write {{{word}: FUNCTION}} instead of FUNCTION")
    ours = [name for name in signature.takes if name in ONLY_OURS]
    trls = [name for name in signature.takes if name in ONLY_TRL]
    if ours and trls:
        conflict = f"{ours[0]!r} is a parameter of our convention, and {trls[0]!r} of TRL's"
        raise ValueError(f"rewards: {conflict}; write {{trl: FUNCTION}} or {{grpo_fast: FUNCTION}}")
    return TRL if trls or (signature.takes_all and not ours) else OURS


class Reply(NamedTuple):
    """Result of a call of a reward function.

    Attributes:
        scores: for each completion its score, or a string with the reason why it has no score.
        note: what is wrong with the first value that is not a score, or "".
        extra: columns that the function logged through TRL's `log_extra`.
        metrics: values that the function logged through TRL's `log_metric`.
    """

    scores: list[Score | str]
    note: str
    extra: dict[str, list[Any]]
    metrics: dict[str, list[float]]


class Function:
    """Reward function of any convention that runs in this process.

    Args:
        function: a function, or a class whose instances can be called.
        convention: one of CONVENTIONS. None detects OURS or TRL; see `convention_of`.
        options: arguments of every call, or of the constructor of a class.

    Raises:
        ValueError: the function does not accept an option, or its convention must be named.
    """

    def __init__(
        self, function: RewardFunction, convention: str | None, options: Mapping[str, Any]
    ) -> None:
        given = signature_of(function)
        unknown = [option for option in options if option not in given.takes]
        if unknown and not given.takes_all:
            names = [name for name in given.takes if name not in (*SAMPLED, "answers")]
            expected = f"expected options among {', '.join(names) or 'none'}"
            got = f"unexpected keyword argument {unknown[0]!r}"
            raise ValueError(f"rewards: {getattr(function, '__name__', 'f')}: {got}, {expected}")
        self.function = functools.partial(function, **options)
        if inspect.isclass(function):
            self.function = functools.partial(self.function())
        signature = signature_of(self.function)
        is_unsure = convention is None and signature.takes_all
        convention = convention or convention_of(signature)
        if convention == OPENRLHF:  # passes its arguments by position
            signature = Signature([*OPENRLHFS], [*OPENRLHFS], False)
        per_sample = convention == VERL or bool(getattr(self.function.func, "per_sample", False))
        self.signature = Signature(*signature[:3], convention, per_sample, is_unsure)
        self.reads_chats = getattr(self.function.func, "reads_chats", False)  # see RewardModel

    def call(
        self, count: int, columns: Mapping[str, Any], lengths: list[int] | None = None,
        state: Mapping[str, Any] | None = None,
    ) -> Reply:  # fmt: skip
        """Call the function with lists as arguments and check its result.

        Args:
            count: number of completions.
            columns: the columns that the function accepts.
            lengths: number of tokens of each completion. None: no rewards per token are accepted.
            state: fields of TRL's `trainer_state`. None passes no such object.

        Raises:
            RewardFailure: the function did not return one value per completion.
            BaseException: an error of any class that the function raised.
        """
        # 1. Pass the objects of TRL. A column must not replace an option of the same name.
        extra: dict[str, list[Any]] = defaultdict(list)
        metrics: dict[str, list[float]] = defaultdict(list)
        if state is not None:
            objects = {
                "trainer_state": SimpleNamespace(**{**STATE, **state}),
                "log_extra": lambda column, values: extra[str(column)].extend(values),
                "log_metric": lambda name, value: metrics[str(name)].append(float(value)),
            }
            columns = {**columns, **self.signature.select(objects)}
        columns = {name: x for name, x in columns.items() if name not in self.function.keywords}
        # 2. Call the function.
        result: Any
        if self.signature.convention == VERL:  # scores one completion
            rows = zip(*columns.values(), strict=True)
            named = [dict(zip(columns, row, strict=True)) for row in rows]
            each = _in_a_loop([functools.partial(self.function, **one) for one in named])
            result = [float(x["score"] if isinstance(x, Mapping) else x) for x in each]
        elif self.signature.convention == OPENRLHF:
            given = [columns[name] for name in OPENRLHFS]
            [result] = _in_a_loop([functools.partial(self.function, *given)])
            result = result["rewards"] if isinstance(result, Mapping) else result
        else:  # is called outside of an event loop, because it may call asyncio.run
            result = self.function(**columns)
            if inspect.isawaitable(result):
                [result] = _in_a_loop([lambda: result])
        # 3. Check the values.
        scores: list[Score | str] = []
        notes: list[str] = []
        for value, length in zip(_values(result, count), lengths or [None] * count, strict=True):
            try:
                scores.append(_score(value, length))
            except RewardFailure as failure:
                scores.append(failure.why)
                notes.append(str(failure))
        return Reply(scores, (*notes, "")[0], extra, metrics)


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


def _in_a_loop(calls: list[Callable[[], Any]]) -> list[Any]:
    """Call functions in an event loop, in which they may start tasks, and await their results."""

    async def one(call: Callable[[], Any]) -> Any:
        result = call()
        return await result if inspect.isawaitable(result) else result

    async def wait() -> list[Any]:
        return await asyncio.gather(*map(one, calls))

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


def _score(value: Any, length: int | None) -> Score:
    """Return the reward of a completion of `length` tokens, or raise a RewardFailure."""
    values = value.tolist() if hasattr(value, "tolist") else value
    if values is None:
        return None
    if not isinstance(values, (list, tuple)) or length is None:
        return _number(values)
    if len(values) != length:
        got = f"expected a reward for each of {length} tokens, got {len(values)}"
        raise RewardFailure(got, WRONG_LENGTH)
    numbers = [_number(item) for item in values]
    _number(sum(numbers))
    return numbers


def _number(value: Any) -> float:
    number = math.nan
    if not isinstance(value, (str, bytes, bytearray)):  # float("1") would accept a string
        with contextlib.suppress(Exception):
            number = float(value)
            struct.pack("<f", number)  # fails for a number that would be infinite in fp32
            if math.isfinite(number):
                return number
    raise RewardFailure(f"not a finite number: {text_of(value, 60)!r}", NO_NUMBERS)


# ------------------------------------------------------------------------------------ the worker
def serve(pipe: Connection) -> None:
    """Answer JSON requests from the pipe until the caller closes it.

    Raises:
        EOFError: the caller has closed the pipe.
    """
    modules: Modules = {}
    functions: dict[str, Function] = {}
    while True:
        given, call = json.loads(pipe.recv_bytes())
        try:
            key = json.dumps(given)
            if key not in functions:
                path, convention, options = given
                functions[key] = Function(import_function(path, modules), convention, options)
            function = functions[key]
            # Without arguments, describe the function.
            reply: Any = function.call(*call) if call else function.signature
        except BaseException as error:  # a user's function may raise anything
            reply = {"error": describe(error), "why": why_of(error)}
        pipe.send_bytes(json.dumps(reply, default=text_of).encode())


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
