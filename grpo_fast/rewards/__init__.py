"""Reward functions: rules, reward models and custom functions. `RewardSet` combines them."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from grpo_fast.errors import RewardError, argument_error, nearest_hint
from grpo_fast.rewards import rules
from grpo_fast.rewards.columns import check_examples, score
from grpo_fast.rewards.conventions import (
    OURS,
    Loaded,
    Modules,
    RewardFailure,
    RewardFunction,
    import_function,
    load,
)
from grpo_fast.rewards.isolated import IsolatedReward, Worker, built_in, path_of
from grpo_fast.rewards.reward_model import RewardModel
from grpo_fast.rewards.reward_set import RewardResult, RewardSet, WeightedReward
from grpo_fast.rewards.scoring import EXPRESSIONS, Scorer, scorer_for

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
# Built-in reward functions that run in a worker process, each with the file that defines it.
WORKERS = {"format_pattern": "slow.py", "code_tests": "code_tests.py"}
# Functions whose `timeout` is per completion. The time limit of a call is `timeout` times the
# number of completions.
BOUNDED = ("code_tests",)
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
    modules: Modules = {}
    processes: dict[str, Worker] = defaultdict(Worker)  # functions of one module share a process
    rewards = [_resolve(spec, modules, processes) for spec in specs]
    return RewardSet(rewards, max_failures=max_failures)


def _resolve(spec: Any, modules: Modules, processes: dict[str, Worker]) -> WeightedReward:
    name = spec.name
    is_custom = ":" in name
    if not is_custom and name not in KNOWN:
        hint = nearest_hint(name, KNOWN)
        if name.endswith(".py"):
            hint = f"; name a function of the file, for example '{name}:reward'"
        custom = "a custom function 'package.module:function' or 'file.py:function'"
        raise argument_error("rewards", f"{', '.join(KNOWN)}, or {custom}", f"{name!r}{hint}")
    convention = spec.convention if is_custom else OURS
    if name in WORKERS or (is_custom and not spec.in_process):
        path = name if is_custom else path_of(f"{WORKERS[name]}:{name}")
        isolated = IsolatedReward(
            path, timeout=spec.timeout, options=spec.options, bounded=name in BOUNDED,
            convention=convention, worker=processes[path.rpartition(":")[0]],
        )  # fmt: skip
        loaded = _load_in_worker(name, isolated)
    elif name == "reward_model":
        loaded = load(RewardModel, OURS, {"path": spec.path, **spec.options})
    else:
        if name in ("math_equal", "math_close"):
            _load_in_worker(name, built_in(EXPRESSIONS), " (pip install 'grpo_fast[math]')")
        loaded = load(REWARDS.get(name) or import_function(name, modules), convention, spec.options)
    function, convention, parameters = loaded
    # A custom function with `answers` and `**columns` may have been written for TRL. If the data
    # has a column `answers`, TRL would pass this column instead of the gold answers.
    is_unsure = is_custom and spec.convention is None and parameters.takes_all
    label = spec.label or name.rpartition(":")[2]
    weight = float(spec.weight)
    return WeightedReward(label, weight, function, parameters.needs, convention, is_unsure)


def _load_in_worker(name: str, function: IsolatedReward, remedy: str = "") -> Loaded:
    try:
        return function.load()
    except RewardFailure as error:
        # Remove the prefix from the worker's message, because the new message begins with it, too.
        message = str(error).removeprefix("ValueError: rewards: ")
        raise ValueError(f"rewards: {name} cannot be used: {message}{remedy}") from None
