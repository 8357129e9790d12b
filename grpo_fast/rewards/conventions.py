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
import numbers
import os
import select
import signal
import sys
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
class Parameters(NamedTuple):
    """Names of the columns that a function accepts, and of the columns that it requires."""

    takes: list[str]
    needs: list[str]
    takes_all: bool  # True for a function with `**columns`, which accepts all columns

    def select(self, columns: Mapping[str, Any]) -> dict[str, Any]:
        """Return the columns that the function accepts."""
        return {name: x for name, x in columns.items() if self.takes_all or name in self.takes}


def parameters_of(function: RewardFunction) -> Parameters:
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
    return Parameters([p.name for p in by_name], needs, takes_all)


def convention_of(parameters: Parameters) -> str:
    """Return OURS or TRL, depending on the parameters of a function.

    A function with `**kwargs` is assumed to be written for TRL, which passes all columns to every
    function.

    Raises:
        ValueError: the parameters mix two conventions, or belong to verl or OpenRLHF. The
            configuration must then name the convention.
    """
    for name, word in (("solution_str", VERL), ("queries", OPENRLHF)):
        if name in parameters.takes:
            conflict = f"{name!r} is a parameter of {word}'s convention"
            raise ValueError(f"rewards: {conflict}; write {{{word}: FUNCTION}} instead of FUNCTION")
    ours = [name for name in parameters.takes if name in ONLY_OURS]
    trls = [name for name in parameters.takes if name in ONLY_TRL]
    if ours and trls:
        conflict = f"{ours[0]!r} is a parameter of our convention, and {trls[0]!r} of TRL's"
        raise ValueError(f"rewards: {conflict}; write {{trl: FUNCTION}} or {{grpo_fast: FUNCTION}}")
    return TRL if trls or (parameters.takes_all and not ours) else OURS


class Loaded(NamedTuple):
    """Reward function that accepts lists as keyword arguments, and how it must be called."""

    function: RewardFunction
    convention: str
    parameters: Parameters


def load(function: RewardFunction, convention: str | None, options: Mapping[str, Any]) -> Loaded:
    """Adapt a function of any convention, so that it accepts lists as keyword arguments.

    Args:
        function: a function, or a class whose instances can be called.
        convention: one of CONVENTIONS. None detects OURS or TRL; see `convention_of`.
        options: arguments of every call, or of the constructor of a class.

    Raises:
        ValueError: the function does not accept an option, or its convention must be named.
    """
    takes, _, takes_all = parameters_of(function)
    unknown = [option for option in options if option not in takes]
    if unknown and not takes_all:
        names = [name for name in takes if name not in (*SAMPLED, "answers")]
        expected = f"expected options among {', '.join(names) or 'none'}"
        got = f"unexpected keyword argument {unknown[0]!r}"
        raise ValueError(f"rewards: {getattr(function, '__name__', 'f')}: {got}, {expected}")
    bound: Any = functools.partial(function, **options)
    if inspect.isclass(function):
        bound = bound()
    convention = convention or convention_of(parameters_of(bound))
    if convention == VERL:
        bound = _of_verl(bound)
    elif convention == OPENRLHF:
        bound = _of_openrlhf(bound)
    return Loaded(bound, convention, parameters_of(bound))


def _of_verl(compute_score: RewardFunction) -> RewardFunction:
    """Wrap verl's `compute_score`, which scores one completion, so that it accepts lists."""

    async def one(**arguments: Any) -> Any:
        result = compute_score(**arguments)
        result = await result if inspect.isawaitable(result) else result
        return float(result["score"] if isinstance(result, Mapping) else result)

    @functools.wraps(compute_score)
    async def of_batch(**columns: Any) -> list[Any]:
        rows = zip(*columns.values(), strict=True)
        each = [one(**dict(zip(columns, row, strict=True))) for row in rows]
        return await asyncio.gather(*each)

    of_batch.per_sample = True  # type: ignore[attr-defined]
    return of_batch


def _of_openrlhf(reward_func: RewardFunction) -> RewardFunction:
    """Wrap OpenRLHF's `reward_func` so that its positional arguments can be passed by name."""

    async def of_batch(queries: Any, prompts: Any, labels: Any) -> Any:
        result = reward_func(queries, prompts, labels)
        result = await result if inspect.isawaitable(result) else result
        return result["rewards"] if isinstance(result, Mapping) else result

    return of_batch


def is_per_sample(function: RewardFunction) -> bool:
    """Return True if a function has a true attribute `per_sample`.

    With this attribute, a function declares that each value depends on only one completion. If a
    call of it fails, it is called again for each sample. Other functions are not called again.
    """
    if isinstance(function, functools.partial):  # binds the options
        function = function.func
    return bool(getattr(function, "per_sample", False))


class RunLog:
    """Columns and metrics that reward functions logged through the functions that TRL passes."""

    def __init__(self) -> None:
        self.extra: dict[str, list[Any]] = {}  # columns of the table of completions
        self.metrics: dict[str, list[float]] = {}

    def log_extra(self, column: str, values: Any) -> None:
        self.extra.setdefault(str(column), []).extend(values)

    def log_metric(self, name: str, value: Any) -> None:
        self.metrics.setdefault(str(name), []).append(float(value))

    def objects(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return `trainer_state`, `log_extra` and `log_metric`, which TRL passes to functions."""
        values = (SimpleNamespace(**{**STATE, **state}), self.log_extra, self.log_metric)
        return dict(zip(ONLY_TRL, values, strict=True))


# -------------------------------------------------------------------------------- call a function
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
def serve(pipe: Connection) -> None:
    """Answer JSON requests from the pipe until the caller closes it.

    Raises:
        EOFError: the caller has closed the pipe.
    """
    modules: Modules = {}
    functions: dict[str, Loaded] = {}
    while True:
        request = json.loads(pipe.recv_bytes())
        try:
            reply = _reply(modules, functions, **request)
        except BaseException as error:  # a user's function may raise anything
            reply = {"error": describe(error), "why": why_of(error)}
        pipe.send_bytes(json.dumps(reply, default=text_of).encode())


def _reply(
    modules: Modules, functions: dict[str, Loaded], given: list[Any], count: int = 0,
    arguments: dict[str, Any] | None = None, state: dict[str, Any] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Call a function, or describe its parameters if there are no arguments.

    Args:
        modules: the modules that were imported for earlier requests.
        functions: the functions of earlier requests.
        given: the function's path, convention and options.
        count: number of completions.
        arguments: keyword arguments of the call.
        state: fields of TRL's `trainer_state`.
    """
    key = json.dumps(given)
    if key not in functions:
        path, convention, options = given
        functions[key] = load(import_function(path, modules), convention, options)
    loaded = functions[key]
    if arguments is None:
        per_sample = is_per_sample(loaded.function)
        return {**loaded._asdict(), "function": None, "per_sample": per_sample}
    log = RunLog()
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
    handle, lifeline = map(int, sys.argv[1:])
    os.set_inheritable(handle, False)  # programs that the function starts must not get the pipe
    _end_with_the_caller(lifeline)
    with contextlib.suppress(EOFError):  # the caller has closed the pipe
        serve(Connection(handle))
