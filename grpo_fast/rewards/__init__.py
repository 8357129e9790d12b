"""Rewards: rule functions, functions by import path, and the set that calls them."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Sequence
from typing import Any, Protocol

from grpo_fast.rewards.calling import RewardFunction, import_function
from grpo_fast.rewards.isolated import IsolatedReward
from grpo_fast.rewards.reward_set import RewardError, RewardResult, RewardSet, WeightedReward
from grpo_fast.rewards.rules import (
    Scorer,
    exact_match,
    gsm8k_correct,
    gsm8k_correct_lenient,
    gsm8k_format,
    scorer_for,
    sort_inclusion_ordering,
    sort_positions,
)
from grpo_fast.rewards.text import distinct_words

__all__ = [
    "REWARDS",
    "RewardError",
    "RewardResult",
    "RewardSet",
    "Scorer",
    "WeightedReward",
    "build_rewards",
    "import_function",
    "scorer_for",
]

REWARDS: dict[str, RewardFunction] = {
    function.__name__: function
    for function in (
        gsm8k_correct,
        gsm8k_correct_lenient,
        gsm8k_format,
        sort_positions,
        sort_inclusion_ordering,
        exact_match,
        distinct_words,
    )
}


class RewardSpec(Protocol):
    """The part of a reward's config read here.

    `options` are keywords for the function. `timeout` (seconds) is not passed on to one by import
    path: it runs in a process of its own, and each call may take that long.
    """

    @property
    def name(self) -> str: ...
    @property
    def weight(self) -> float: ...
    @property
    def options(self) -> dict[str, Any]: ...


def build_rewards(specs: Sequence[RewardSpec], *, max_failures: float = 0.5) -> RewardSet:
    """Look up every reward function before the run starts.

    Raises:
        ValueError: an unknown name (the nearest is named), an import path that does not lead to a
            function, options that the function does not take, a timeout that cannot be waited for.
    """
    rewards = [
        WeightedReward(spec.name.rpartition(":")[2], float(spec.weight), _resolve(spec))
        for spec in specs
    ]
    return RewardSet(rewards, max_failures=max_failures)


def _resolve(spec: RewardSpec) -> RewardFunction:
    name, options, timeout = spec.name, dict(spec.options), None
    if ":" in name:
        timeout = options.pop("timeout", None)
        function = import_function(name)
    elif name in REWARDS:
        function = REWARDS[name]
    else:
        close = difflib.get_close_matches(name, REWARDS, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(REWARDS)}"
        own = "Own ones go by 'package.module:function'"
        raise ValueError(f"rewards: no reward is called {name!r}; {hint} {own}")
    _check_call(name, function, options)
    if timeout is not None:
        return IsolatedReward(name, timeout=timeout, options=options)
    return functools.partial(function, **options) if options else function


def _check_call(name: str, function: RewardFunction, options: dict[str, Any]) -> None:
    """Raise a ValueError where the function's parameters are not those that a run gives it."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # not every callable tells
        return
    try:
        signature.bind(**{"prompts": [], "completions": [], "answers": [], **options})
    except TypeError as error:
        expects = "expects other arguments than a run gives it"
        raise ValueError(f"rewards: {name} {expects}: {error}") from None
