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
    Function,
    Modules,
    RewardFailure,
    RewardFunction,
    import_function,
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
    needed = None  # the worker that the function needs
    remedy = ""
    function: Function | IsolatedReward
    if name == "reward_model":
        function = Function(RewardModel, OURS, {"path": spec.path, **spec.options})
    elif name in REWARDS or (is_custom and spec.in_process):
        called = REWARDS.get(name) or import_function(name, modules)
        function = Function(called, convention, spec.options)
        if name in ("math_equal", "math_close"):
            needed = built_in(EXPRESSIONS)
            remedy = " (pip install 'grpo_fast[math]')"
    else:
        path = name if is_custom else path_of(f"{WORKERS[name]}:{name}")
        worker = processes[path.rpartition(":")[0]]
        function = needed = IsolatedReward(
            path, spec.timeout, spec.options, convention, name in BOUNDED, worker
        )
    try:
        if needed is not None:
            needed.load()
    except RewardFailure as error:
        # Remove the prefix from the worker's message, because the new message begins with it, too.
        message = str(error).removeprefix("ValueError: rewards: ")
        raise ValueError(f"rewards: {name} cannot be used: {message}{remedy}") from None
    label = spec.label or name.rpartition(":")[2]
    return WeightedReward(label, float(spec.weight), function)
