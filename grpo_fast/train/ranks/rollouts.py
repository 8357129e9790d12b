"""Each rank samples its share of the prompts, rank 0 scores, and all ranks get the table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from grpo_fast import rewards, rollout
from grpo_fast.data import Example
from grpo_fast.rewards import RewardResult, RewardSet
from grpo_fast.rollout import Engine, Samples, Sampling
from grpo_fast.train.ranks import distributed


def generate(
    policy: Any, prompts: Sequence[Any], options: Sampling, *, engine: Engine | None = None,
    **others: Any,
) -> Samples:  # fmt: skip
    """Call `rollout.generate` on all ranks. The completions do not depend on their number."""
    if distributed.size() == 1:
        return rollout.generate(policy, prompts, options, engine=engine, **others)
    is_apart = engine is not None and engine.is_apart
    with policy.apart() if is_apart else policy.whole(), distributed.together():
        own = generate_share(policy, prompts, options, engine=engine, **others)
    return join_ranks(own)


def generate_share(
    policy: Any, prompts: Sequence[Any], options: Sampling, **others: Any
) -> Samples | None:
    """Sample this rank's share of the prompts, None if it has none. Not collective."""
    count = len(prompts)
    ranks = distributed.size()
    rank = distributed.rank()
    places = range(count * rank // ranks, count * (rank + 1) // ranks)
    if not places:
        return None
    own = prompts[places.start : places.stop]
    return rollout.generate(policy, own, options, places=places, **others)


def join_ranks(own: Samples | None) -> Samples:
    """Gather the tables of all ranks into one, in the order of their prompts. Collective."""
    return Samples.cat(distributed.gather(own))


def score(
    reward_set: RewardSet,
    examples: Sequence[Example],
    texts: Sequence[str],
    ids: Sequence[list[int]] | None = None,
    prompt_texts: Sequence[str] | None = None,
) -> RewardResult:
    """Call `rewards.score` on rank 0: a function sees the batch that it sees in one process."""
    return distributed.from_main(
        lambda: rewards.score(reward_set, examples, texts, ids, prompt_texts)
    )
