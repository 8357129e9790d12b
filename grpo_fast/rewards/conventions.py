"""Conventions of grpo_fast, TRL, verl and OpenRLHF for the arguments of reward functions.

A worker (`calling.py`) imports this file without the package, so it may use only the standard
library.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

RewardFunction = Callable[..., Any]
OURS, TRL, VERL, OPENRLHF = CONVENTIONS = ("grpo_fast", "trl", "verl", "openrlhf")
# Columns that a function for grpo_fast can request, in addition to those of the data.
SAMPLED = ("prompts", "completions", "completion_ids", "completion_lengths", "prefills")
# Parameters by which a convention is recognised, because no other convention has them.
ONLY_OURS = ("answers", "completion_lengths", "prefills")
ONLY_TRL = ("trainer_state", "log_extra", "log_metric")
VERLS = ("data_source", "solution_str", "ground_truth", "extra_info")


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
        values = (SimpleNamespace(**state), self.log_extra, self.log_metric)
        return dict(zip(ONLY_TRL, values, strict=True))


def columns_of_others(
    prompts: Sequence[object],
    completions: Sequence[str],
    answers: Sequence[str | None],
    columns: Mapping[str, Sequence[Any]],
    labels: Sequence[object],
    prompt_texts: Sequence[str],
) -> dict[str, dict[str, Sequence[Any]]]:
    """Build the arguments of functions that were written for TRL, verl or OpenRLHF.

    Args:
        prompts: N prompts, each a string or a list of messages.
        completions: N completions.
        answers: N gold answers as strings.
        columns: the other columns of the data.
        labels: N gold answers as they are in the rows of the data.
        prompt_texts: N prompts as the model received them.

    Returns:
        For each convention (TRL, verl, OpenRLHF), a dict that maps parameter names to columns.
    """
    messages = []
    for prompt, text in zip(prompts, completions, strict=True):
        # For a chat prompt, TRL passes the completion as a list with one message.
        is_text = isinstance(prompt, str)
        messages.append(text if is_text else [{"role": "assistant", "content": text}])
    none = [None] * len(messages)
    queries = [f"{prompt}{text}" for prompt, text in zip(prompt_texts, completions, strict=True)]
    return {
        # As in TRL, a column of the data replaces our column of the same name.
        TRL: {"answers": answers, "answer": labels, **columns, "prompts": prompts,
              "completions": messages},
        VERL: {"data_source": columns.get("data_source", none), "solution_str": completions,
               "ground_truth": labels,
               "extra_info": [info or {} for info in columns.get("extra_info", none)]},
        OPENRLHF: {"queries": queries, "prompts": prompt_texts, "labels": labels},
    }  # fmt: skip


def is_per_sample(function: RewardFunction) -> bool:
    """Return True if a function has a true attribute `per_sample`.

    With this attribute, a function declares that each value depends on only one completion. If a
    call of it fails, it is called again for each sample. Other functions are not called again.
    """
    if isinstance(function, functools.partial):  # binds the options
        function = function.func
    return bool(getattr(function, "per_sample", False))
