"""Reward functions: rules, reward models and custom functions. `RewardSet` combines them."""

from __future__ import annotations

import difflib
import inspect
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from grpo_fast.errors import RewardError
from grpo_fast.rewards import rules, workers
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
from grpo_fast.rewards.isolated import START_LIMIT_S, IsolatedReward, Worker
from grpo_fast.rewards.reward_model import RewardModel
from grpo_fast.rewards.reward_set import RewardResult, RewardSet, WeightedReward
from grpo_fast.rewards.scoring import Scorer, expressions_worker, scorer_for

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
    rewards = [_resolve(spec, modules, processes[spec.name.rpartition(":")[0]]) for spec in specs]
    return RewardSet(rewards, max_failures=max_failures)


def _resolve(spec: Any, modules: Modules, worker: Worker) -> WeightedReward:
    name = spec.name
    is_custom = ":" in name
    if not is_custom and name not in KNOWN:
        close = difflib.get_close_matches(name, KNOWN, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"expected one of {', '.join(KNOWN)}"
        custom = "a custom function is 'package.module:function' or 'file.py:function'"
        if name.endswith(".py"):
            hint = f"name a function of the file, for example '{name}:reward'"
        raise ValueError(f"rewards: got the unknown name {name!r}; {hint}; {custom}")
    convention = spec.convention if is_custom else OURS
    if name in WORKERS or (is_custom and not spec.in_process):
        loaded = _load_in_worker(spec, convention, worker if is_custom else Worker())
    elif name == "reward_model":
        loaded = load(RewardModel, OURS, {"path": spec.path, **spec.options})
    else:
        if name in ("math_equal", "math_close"):
            _check_math(name)
        loaded = load(REWARDS.get(name) or import_function(name, modules), convention, spec.options)
    function, convention, parameters = loaded
    # A custom function with `answers` and `**columns` may have been written for TRL. If the data
    # has a column `answers`, TRL would pass this column instead of the gold answers.
    is_unsure = is_custom and spec.convention is None and parameters.takes_all
    label = spec.label or name.rpartition(":")[2]
    weight = float(spec.weight)
    return WeightedReward(label, weight, function, parameters.needs, convention, is_unsure)


def _check_math(name: str) -> None:
    """Start the worker that compares expressions, and check that it finds math-verify.

    The first comparison imports sympy, which takes longer than a comparison may take if the machine
    is busy.
    """
    worker = expressions_worker()
    limit = worker.timeout
    worker.timeout = START_LIMIT_S
    try:
        worker(completions=["x"], answers=["x"], seconds=60, digits=None)
    except RewardFailure as error:
        remedy = "pip install 'grpo_fast[math]'"
        raise ValueError(f"rewards: {name} cannot be used: {error} ({remedy})") from None
    finally:
        worker.timeout = limit


def _load_in_worker(spec: Any, convention: str | None, worker: Worker) -> Loaded:
    name = spec.name
    path = f"{Path(workers.__file__).with_name(WORKERS[name])}:{name}" if name in WORKERS else name
    function = IsolatedReward(
        path, timeout=spec.timeout, options=spec.options, bounded=name in BOUNDED,
        convention=convention, worker=worker,
    )  # fmt: skip
    try:
        return function.load()
    except RewardFailure as error:
        # Remove the prefix from the worker's message, because the new message begins with it, too.
        message = str(error).removeprefix("ValueError: rewards: ")
        raise ValueError(f"rewards: {name} cannot be used: {message}") from None
