"""Reward functions: rules, reward models and custom functions. `RewardSet` combines them."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from grpo_fast.errors import RewardError, require
from grpo_fast.rewards import rules, workers
from grpo_fast.rewards.calling import RewardFailure, RewardFunction, import_function
from grpo_fast.rewards.columns import SAMPLED, check_examples, score
from grpo_fast.rewards.conventions import OURS, Loaded, Parameters, load, parameters_of
from grpo_fast.rewards.isolated import IsolatedReward
from grpo_fast.rewards.reward_model import RewardModel
from grpo_fast.rewards.reward_set import RewardResult, RewardSet, WeightedReward
from grpo_fast.rewards.scoring import Scorer, scorer_for

__all__ = [
    "REWARDS",
    "RewardError",
    "RewardResult",
    "RewardSet",
    "Scorer",
    "WeightedReward",
    "build_rewards",
    "check_examples",
    "import_function",
    "score",
    "scorer_for",
]

# The public functions of rules.py, keyed by the name that a configuration uses.
REWARDS: dict[str, RewardFunction] = {
    name: function
    for name, function in inspect.getmembers(rules, inspect.isfunction)
    if function.__module__ == rules.__name__ and not name.startswith("_")
}
for _function in REWARDS.values():
    setattr(_function, "per_sample", True)  # noqa: B010
# Built-in reward functions that run in a worker process, each with the file that defines it. A
# worker starts quickly, because it imports only this file and not the package.
WORKERS = {
    "format_pattern": "pattern.py",
    "math_equal": "math_answers.py",
    "math_close": "math_answers.py",
    "code_tests": "code_tests.py",
}
# Functions whose `timeout` is per completion. The time limit of a call is `timeout` times the
# number of completions.
BOUNDED = ("math_equal", "math_close", "code_tests")
KNOWN = (*REWARDS, *WORKERS, "reward_model")


def build_rewards(specs: Sequence[Any], *, max_failures: float = 0.5) -> RewardSet:
    """Build the reward functions of a run.

    Args:
        specs: objects with the fields of `RewardConfig`: name, label, weight, options, path,
            timeout, in_process and convention.
        max_failures: fraction of samples without a reward above which the run ends with a
            RewardError; see `RewardSet`.

    Raises:
        ValueError: a name is unknown, there is no function at a path, or a function does not accept
            an option.
    """
    rewards = [_resolve(spec) for spec in specs]
    return RewardSet(rewards, max_failures=max_failures)


def _resolve(spec: Any) -> WeightedReward:
    name = spec.name
    options = dict(spec.options)
    label = spec.label or name.rpartition(":")[2]
    weight = float(spec.weight)
    # 1. Load a reward model in this process.
    if name == "reward_model":
        require(spec.path is not None, "rewards: reward_model: path", "a folder or hub id", "none")
        build = functools.partial(RewardModel, spec.path)
        _checked_needs(name, parameters_of(build), options)
        return WeightedReward(label, weight, build(**options))
    # 2. Import a rule or a custom function in this process, or prepare a worker that imports it.
    path = _worker_path(name, spec.in_process)
    is_custom = ":" in name
    convention = spec.convention if is_custom else OURS
    function: Any
    if path is None:
        loaded = load(REWARDS.get(name) or import_function(name), convention, options)
        function = functools.partial(loaded.function, **loaded.options)
    else:
        function = IsolatedReward(
            path, timeout=spec.timeout, options=options, bounded=name in BOUNDED,
            convention=convention,
        )  # fmt: skip
        loaded = _loaded(name, function)
    # 3. Refuse unknown options, and find the columns that the function requires.
    needs = _checked_needs(name, loaded.parameters, loaded.options)
    # A custom function with `answers` and `**columns` may have been written for TRL. If the data
    # has a column `answers`, TRL would pass this column instead of the gold answers.
    is_unsure = is_custom and convention is None and loaded.parameters.takes is None
    return WeightedReward(label, weight, function, needs, loaded.convention, is_unsure)


def _worker_path(name: str, in_process: bool) -> str | None:
    """Return the path of a function that runs in a worker, or None if it runs in this process."""
    if name in WORKERS:
        return f"{Path(workers.__file__).with_name(WORKERS[name])}:{name}"
    if ":" in name:
        return None if in_process else name
    if name not in REWARDS:
        close = difflib.get_close_matches(name, KNOWN, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"expected one of {', '.join(KNOWN)}"
        custom = "a custom function is 'package.module:function' or 'file.py:function'"
        if name.endswith(".py"):
            hint = f"name a function of the file, for example '{name}:reward'"
        raise ValueError(f"rewards: got the unknown name {name!r}; {hint}; {custom}")
    return None


def _loaded(name: str, function: IsolatedReward) -> Loaded:
    try:
        return function.load()
    except (RewardFailure, TimeoutError) as error:
        extra = " (pip install 'grpo_fast[math]')" if "'math_verify'" in str(error) else ""
        # Remove the prefix from the worker's message, because the new message begins with it, too.
        message = str(error).removeprefix("ValueError: rewards: ")
        raise ValueError(f"rewards: {name} cannot be used: {message}{extra}") from None


def _checked_needs(name: str, parameters: Parameters, options: dict[str, Any]) -> list[str]:
    """Return the columns that the function requires. Raise ValueError for an unknown option."""
    takes, needs = parameters
    unknown = [] if takes is None else [option for option in options if option not in takes]
    if unknown:
        options_of = [option for option in takes if option not in (*SAMPLED, "answers")]
        expected = f"expected options among {', '.join(options_of) or 'none'}"
        got = f"unexpected keyword argument {unknown[0]!r}"
        raise ValueError(f"rewards: {name}: {got}, {expected}")
    return [column for column in needs if column not in options]
