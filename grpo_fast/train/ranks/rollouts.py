"""Sampling on several ranks.

Each rank samples completions for its share of the prompts. Rank 0 scores all completions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from grpo_fast import rewards, rollout
from grpo_fast.rewards import RewardResult
from grpo_fast.rollout import Engine, Samples, Sampling
from grpo_fast.train.ranks import distributed


def generate(
    policy: Any, prompts: Sequence[Any], options: Sampling, *, engine: Engine | None = None,
    **others: Any,
) -> Samples:  # fmt: skip
    """Sample completions for all prompts, which are divided among the ranks.

    All ranks must call this.

    Args:
        policy: the policy from which to sample.
        prompts: all prompts of the step.
        options: the sampling options.
        engine: the engine that samples. None uses transformers.
        **others: further arguments of `rollout.generate`.

    Returns:
        The samples of all prompts, on every rank. They do not depend on the number of ranks.
    """
    if distributed.size() == 1:
        return rollout.generate(policy, prompts, options, engine=engine, **others)
    is_apart = engine is not None and engine.is_apart
    with policy.apart() if is_apart else policy.whole(), distributed.together():
        own = generate_share(policy, prompts, options, engine=engine, **others)
    return join_ranks(own)


def generate_share(
    policy: Any, prompts: Sequence[Any], options: Sampling, **others: Any
) -> Samples | None:
    """Sample completions for this rank's part of the prompts. A single rank may call this.

    Returns:
        The samples, or None if the rank has no prompts.
    """
    count = len(prompts)
    ranks = distributed.size()
    rank = distributed.rank()
    places = range(count * rank // ranks, count * (rank + 1) // ranks)
    if not places:
        return None
    own = prompts[places.start : places.stop]
    return rollout.generate(policy, own, options, places=places, **others)


def join_ranks(own: Samples | None) -> Samples:
    """Join the samples of all ranks in the order of the prompts. All ranks must call this."""
    return Samples.cat(distributed.gather(own))


def score(*arguments: Any) -> RewardResult:
    """Call `rewards.score` on rank 0, and return its result on all ranks. All ranks must call this.

    Reward functions run on rank 0, and receive the same batch as in a single process.
    """
    return distributed.from_main(lambda: rewards.score(*arguments))
