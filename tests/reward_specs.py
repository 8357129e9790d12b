"""A reward's configuration for tests: any value, also one that a recipe would be refused for."""

from types import SimpleNamespace
from typing import Any

from grpo_fast.rewards import RewardSet, WeightedReward


def own(function: Any, weight: float = 1.0, **keywords: Any) -> RewardSet:
    """The set of this function, called f."""
    return RewardSet([WeightedReward("f", weight, function)], **keywords)


def spec(
    name: str,
    weight: float = 1.0,
    *,
    label: str | None = None,
    path: str | None = None,
    timeout: Any = 60.0,
    in_process: bool = False,
    convention: str | None = None,
    **options: Any,
) -> SimpleNamespace:
    """What `build_rewards` reads; what is not named here is an option of the function."""
    return SimpleNamespace(
        name=name, weight=weight, label=label, path=path, timeout=timeout, in_process=in_process,
        options=options, convention=convention,
    )  # fmt: skip
