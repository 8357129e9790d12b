"""The conventions by which reward functions are called: ours, TRL's, verl's and OpenRLHF's.

A worker (`calling.py`) runs this file alone, so it imports only the standard library.
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
ONLY_OURS = ("answers", "completion_lengths", "prefills")  # parameters of no other convention
ONLY_TRL = ("trainer_state", "log_extra", "log_metric")
VERLS = ("data_source", "solution_str", "ground_truth", "extra_info")


class Parameters(NamedTuple):
    """The columns that a function takes by name, and the columns that it needs."""

    takes: list[str] | None  # None: all columns (`**columns`)
    needs: list[str]

    def select(self, columns: Mapping[str, Any]) -> dict[str, Any]:
        chosen = columns if self.takes is None else self.takes
        return {name: columns[name] for name in chosen if name in columns}


USUAL = Parameters(["prompts", "completions", "answers"], [])  # of a callable without a signature


def parameters_of(function: RewardFunction) -> Parameters:
    """Return a function's parameters. Raises ValueError for positional-only parameters."""
    by_name, takes_all = _signature(function)
    if by_name is None:
        return USUAL
    needs = [p.name for p in by_name if p.default is p.empty]
    return Parameters(None if takes_all else [p.name for p in by_name], needs)


def _signature(function: RewardFunction) -> tuple[list[inspect.Parameter] | None, bool]:
    """Return the parameters that are given by name, and whether there is a `**columns`."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None, False
    if any(p.kind is p.POSITIONAL_ONLY for p in parameters):
        raise ValueError("rewards: expected parameters that can be given by name, got one before /")
    by_name = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    return by_name, any(p.kind is p.VAR_KEYWORD for p in parameters)


def convention_of(function: RewardFunction) -> str:
    """Return the convention, ours or TRL's, that a function's parameters show.

    TRL passes every column to every function, so that its functions have `**kwargs`.

    Raises:
        ValueError: the parameters are those of two conventions, or of one that must be named.
    """
    by_name, takes_all = _signature(function)
    names = [p.name for p in by_name or ()]
    for name, word in (("solution_str", VERL), ("queries", OPENRLHF)):
        if name in names:
            said = f"{name!r} is a parameter of {word}'s convention"
            raise ValueError(f"rewards: {said}; write {{{word}: FUNCTION}} in place of FUNCTION")
    ours = [name for name in names if name in ONLY_OURS]
    trls = [name for name in names if name in ONLY_TRL]
    if ours and trls:
        said = f"{ours[0]!r} is a parameter of our convention, and {trls[0]!r} of TRL's"
        raise ValueError(f"rewards: {said}; write {{trl: FUNCTION}} or {{grpo_fast: FUNCTION}}")
    return TRL if trls or (takes_all and not ours) else OURS


class Loaded(NamedTuple):
    """A reward function that takes lists by name, its convention, and arguments of every call."""

    function: RewardFunction
    convention: str
    options: dict[str, Any]
    parameters: Parameters


def load(function: RewardFunction, convention: str | None, options: Mapping[str, Any]) -> Loaded:
    """Prepare a function of a convention, None: see `convention_of`. A class is instantiated."""
    options = dict(options)
    if inspect.isclass(function):
        made: Any = function(**options)
        function, options = made, {}
    convention = convention or convention_of(function)
    if convention == VERL:
        function = _of_verl(function)
    elif convention == OPENRLHF:
        function = _of_openrlhf(function)
    return Loaded(function, convention, options, parameters_of(function))


def _of_verl(compute_score: RewardFunction) -> RewardFunction:
    async def one(**arguments: Any) -> Any:
        result = compute_score(**arguments)
        result = await result if inspect.isawaitable(result) else result
        return float(result["score"] if isinstance(result, Mapping) else result)

    @functools.wraps(compute_score)
    async def of_batch(**given: Any) -> list[Any]:
        columns = {name: value for name, value in given.items() if name in VERLS}
        options = {name: value for name, value in given.items() if name not in VERLS}
        rows = zip(*columns.values(), strict=True)
        each = [one(**dict(zip(columns, row, strict=True)), **options) for row in rows]
        return await asyncio.gather(*each)

    of_batch.per_sample = True  # type: ignore[attr-defined]
    return of_batch


def _of_openrlhf(reward_func: RewardFunction) -> RewardFunction:
    async def of_batch(queries: Any, prompts: Any, labels: Any, **options: Any) -> Any:
        result = reward_func(queries, prompts, labels, **options)
        result = await result if inspect.isawaitable(result) else result
        return result["rewards"] if isinstance(result, Mapping) else result

    return of_batch


class RunLog:
    """What reward functions log through TRL's `log_extra` and `log_metric`."""

    def __init__(self) -> None:
        self.extra: dict[str, list[Any]] = {}  # column of the table of completions -> its values
        self.metrics: dict[str, list[float]] = {}

    def log_extra(self, column: str, values: Any) -> None:
        self.extra.setdefault(str(column), []).extend(values)

    def log_metric(self, name: str, value: Any) -> None:
        self.metrics.setdefault(str(name), []).append(float(value))

    def objects(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments that only TRL's convention has."""
        given = SimpleNamespace(**state), self.log_extra, self.log_metric
        return dict(zip(ONLY_TRL, given, strict=True))


def columns_of_others(
    prompts: Sequence[Any],
    completions: Sequence[str],
    answers: Sequence[str | None],
    columns: Mapping[str, Sequence[Any]],
    labels: Sequence[Any],
    prompt_texts: Sequence[str],
) -> dict[str, dict[str, Sequence[Any]]]:
    """Return the lists of each convention but ours, by their names; see `RewardSet.__call__`.

    As in TRL the completion of a prompt of messages is a list of one message.
    """
    pairs = list(zip(prompts, completions, strict=True))
    said = [
        text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
        for prompt, text in pairs
    ]
    # A column of the data comes before ours of the same name.
    trls = {"answers": answers, "answer": labels, **columns, "prompts": prompts}
    none = [None] * len(pairs)
    verls = {
        "data_source": columns.get("data_source", none), "solution_str": completions,
        "ground_truth": labels, "extra_info": [x or {} for x in columns.get("extra_info", none)],
    }  # fmt: skip
    queries = [f"{prompt}{text}" for prompt, text in zip(prompt_texts, completions, strict=True)]
    openrlhfs = {"queries": queries, "prompts": prompt_texts, "labels": labels}
    return {TRL: {**trls, "completions": said}, VERL: verls, OPENRLHF: openrlhfs}


def is_per_sample(function: RewardFunction) -> bool:
    """Return whether a function declares, by an attribute `per_sample`, that each value depends on
    one completion alone. Only such a function is called again sample by sample.
    """
    while isinstance(function, functools.partial):
        function = function.func
    return bool(getattr(function, "per_sample", False))
