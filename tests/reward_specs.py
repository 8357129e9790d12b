"""Helpers that build configurations of reward functions for tests.

Unlike the configurations in a recipe, they are not validated.
"""

from types import SimpleNamespace
from typing import Any

from grpo_fast.data import Example
from grpo_fast.rewards import RewardResult, RewardSet, WeightedReward, score


def own(function: Any, weight: float = 1.0, **keywords: Any) -> RewardSet:
    """Return a `RewardSet` with `function` as its only reward function, named "f"."""
    return RewardSet([WeightedReward("f", weight, function)], **keywords)


def ask(
    rewards: RewardSet, prompts: Any, completions: Any, answers: Any, columns: Any = None
) -> RewardResult:
    """Return the rewards of completions for examples with these prompts, answers and columns."""
    examples = []
    for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        fields = {name: column[i] for name, column in (columns or {}).items()}
        examples.append(Example(prompt, answer, None, fields))
    return score(rewards, examples, completions)


def spec(
    name: str, weight: float = 1.0, *, label: str | None = None, timeout: Any = 60.0,
    in_process: bool = False, convention: str | None = None, **options: Any,
) -> SimpleNamespace:  # fmt: skip
    """Return the configuration of one reward function for `build_rewards`.

    `build_rewards` passes `options` to the reward function.
    """
    return SimpleNamespace(
        name=name, weight=weight, label=label, timeout=timeout, in_process=in_process,
        options=options, convention=convention,
    )  # fmt: skip
