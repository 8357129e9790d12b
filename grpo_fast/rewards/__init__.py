"""Reward functions: rules, reward models and custom functions. `RewardSet` combines them."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from grpo_fast.errors import RewardError, argument_error, nearest_hint
from grpo_fast.rewards import rules
from grpo_fast.rewards.columns import check_examples, score
from grpo_fast.rewards.conventions import (
    OURS,
    Function,
    RewardFailure,
    RewardFunction,
    import_function,
)
from grpo_fast.rewards.isolated import IsolatedReward, built_in, path_of
from grpo_fast.rewards.reward_set import RewardResult, RewardSet, WeightedReward
from grpo_fast.rewards.scoring import EXPRESSIONS, Scorer, scorer_for

__all__ = [
    "REWARDS", "RewardError", "RewardResult", "RewardSet", "Scorer", "WeightedReward",
    "build_rewards", "check_examples", "import_function", "score", "scorer_for",
]  # fmt: skip

# The public functions of rules.py, keyed by the name that a configuration uses.
REWARDS: dict[str, RewardFunction] = {
    name: function
    for name, function in inspect.getmembers(rules, inspect.isfunction)
    if function.__module__ == rules.__name__ and not name.startswith("_")
}
CODE_TESTS = "code_tests"  # built in, too, and runs in a worker process
KNOWN = (*REWARDS, CODE_TESTS)


def build_rewards(specs: Sequence[Any], *, max_failures: float = 0.5) -> RewardSet:
    """Build the reward functions of a run.

    Args:
        specs: objects with the fields of `RewardConfig`: name, label, weight, options, timeout,
            in_process and convention.
        max_failures: fraction of samples without a reward above which the run ends with a
            RewardError; see `RewardSet`.

    Raises:
        ValueError: a name is unknown, there is no function at a path, or a function does not accept
            an option.
    """
    return RewardSet([_resolve(spec) for spec in specs], max_failures=max_failures)


def _resolve(spec: Any) -> WeightedReward:
    name = spec.name
    if ":" not in name and name not in KNOWN:
        custom = "a custom function 'package.module:function' or 'file.py:function'"
        came = f"{name!r}{nearest_hint(name, KNOWN)}"
        raise argument_error("rewards", f"{', '.join(KNOWN)}, or {custom}", came)
    convention = spec.convention or OURS
    function: Function | IsolatedReward
    try:
        if name in REWARDS or spec.in_process:
            called = REWARDS.get(name) or import_function(name)
            function = Function(called, convention, spec.options)
            if name == "math_equal":
                built_in(EXPRESSIONS).load()
        else:
            is_code = name == CODE_TESTS  # its `timeout` is per completion
            path = path_of("code_tests.py:code_tests") if is_code else name
            function = IsolatedReward(path, spec.timeout, spec.options, convention, is_code)
            function.load()
    except (RewardFailure, ValueError) as error:
        # Remove the prefix from the message, because the new message begins with it, too.
        message = str(error).removeprefix("ValueError: ").removeprefix("rewards: ")
        remedy = " (pip install 'grpo_fast[math]')" if "math_verify" in message else ""
        raise ValueError(f"rewards: {name} cannot be used: {message}{remedy}") from None
    label = spec.label or name.rpartition(":")[2]
    return WeightedReward(label, float(spec.weight), function)
