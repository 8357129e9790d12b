"""Rollouts and rewards of several ranks: each samples its share, rank 0 scores, all know it all."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from pydantic import TypeAdapter
from torch import Tensor

from grpo_fast import rewards, rollout
from grpo_fast.data import Example
from grpo_fast.rewards import RewardResult, RewardSet
from grpo_fast.rollout import Engine, Rollout, Sampling
from grpo_fast.rollout.engine import Seed
from grpo_fast.rollout.saved import split_tensors
from grpo_fast.train.ranks import distributed

OF_A_GROUP = ("prompts", "prompt_ids")  # the same for all its completions


def generate(
    policy: Any,
    prompts: Sequence[Any],
    options: Sampling,
    *,
    group_size: int,
    seed: Seed,
    engine: Engine | None = None,
) -> Rollout:
    """`rollout.generate` by all ranks: the same completions on any number of them."""
    keywords: Any = {"group_size": group_size, "seed": seed, "engine": engine}
    if distributed.size() == 1:
        return rollout.generate(policy, prompts, options, **keywords)
    is_apart = engine is not None and engine.is_apart
    with policy.apart() if is_apart else policy.whole(), distributed.together():
        own = generate_share(policy, prompts, options, **keywords)
    return join_ranks(own, group_size)


def generate_share(
    policy: Any,
    prompts: Sequence[Any],
    options: Sampling,
    *,
    group_size: int,
    seed: Seed,
    engine: Engine | None = None,
) -> Rollout:
    """This rank's part of it, without a word to the others."""
    count, ranks, rank = len(prompts), distributed.size(), distributed.rank()
    places = range(count * rank // ranks, count * (rank + 1) // ranks)
    if not places:
        return Rollout()
    return rollout.generate(
        policy, prompts[places.start : places.stop], options, group_size=group_size, seed=seed,
        engine=engine, places=places,
    )  # fmt: skip


def score(
    reward_set: RewardSet,
    examples: Sequence[Example],
    texts: Sequence[str],
    ids: Sequence[list[int]] | None = None,
) -> RewardResult:
    """`rewards.score` by rank 0: a function sees the batch that it would see in one process."""
    if distributed.size() == 1:
        return rewards.score(reward_set, examples, texts, ids)

    def scored() -> dict[str, Any]:
        scores = rewards.score(reward_set, examples, texts, ids)
        per_fn = {name: values.tolist() for name, values in scores.per_fn.items()}
        rows = [row.tolist() for row in scores.per_token or ()]
        return {
            "total": scores.total.tolist(), "per_fn": per_fn, "reasons": scores.reasons,
            "per_token": None if scores.per_token is None else rows,
        }  # fmt: skip

    scores = distributed.from_main(scored)
    return RewardResult(
        torch.tensor(scores["total"]),
        {name: torch.tensor(values) for name, values in scores["per_fn"].items()},
        {name: Counter(why) for name, why in scores["reasons"].items()},
        scores["per_token"]
        and [torch.tensor(row, dtype=torch.float32) for row in scores["per_token"]],
    )


def join_ranks(own: Rollout, group_size: int) -> Rollout:
    """Gather the rollouts of all ranks into one, in the order of their prompts."""
    if distributed.size() == 1:
        return own
    from safetensors.torch import load, save

    tensors: dict[str, Tensor] = {}
    lists = split_tensors(own, tensors)
    for name in OF_A_GROUP:
        lists[name] = lists[name][::group_size]
    packed = torch.frombuffer(bytearray(save(tensors)), dtype=torch.uint8)
    every = Rollout()
    said = zip(distributed.gather(lists), distributed.gather_tensors(packed), strict=True)
    for theirs, data in said:
        for name in OF_A_GROUP:
            theirs[name] = [one for one in theirs[name] for _ in range(group_size)]
        known = load(data.numpy().tobytes())
        part = TypeAdapter(Rollout).validate_python(theirs, context=known)
        for field in dataclasses.fields(Rollout):
            getattr(every, field.name).extend(getattr(part, field.name))
    return every


def balanced(costs: Sequence[int], ranks: int) -> list[list[int]]:
    """Deal numbers 0 … n−1 to the ranks: the largest first, each to who has the least so far."""
    hands: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for number in sorted(range(len(costs)), key=lambda i: -costs[i]):
        least = min(range(ranks), key=loads.__getitem__)
        hands[least].append(number)
        loads[least] += costs[number]
    return [sorted(hand) for hand in hands]
