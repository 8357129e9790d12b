"""Rollouts and rewards of several ranks: each samples its share, rank 0 scores, all know it all."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from pydantic import TypeAdapter
from torch import Tensor

from grpo_fast import rewards, rollout
from grpo_fast.data import Example
from grpo_fast.rewards import RewardResult, RewardSet
from grpo_fast.rollout import Engine, Rollout, Sampling
from grpo_fast.rollout.saved import split_tensors
from grpo_fast.train.ranks import distributed

OF_A_GROUP = ("prompts", "prompt_ids")  # the same for all its completions


def generate(
    policy: Any, prompts: Sequence[Any], options: Sampling, *, group_size: int,
    engine: Engine | None = None, **others: Any,
) -> Rollout:  # fmt: skip
    """`rollout.generate` by all ranks: the same completions on any number of them."""
    others |= {"group_size": group_size, "engine": engine}
    if distributed.size() == 1:
        return rollout.generate(policy, prompts, options, **others)
    is_apart = engine is not None and engine.is_apart
    with policy.apart() if is_apart else policy.whole(), distributed.together():
        own = generate_share(policy, prompts, options, **others)
    return join_ranks(own, group_size)


def generate_share(
    policy: Any, prompts: Sequence[Any], options: Sampling, **others: Any
) -> Rollout:
    """Sample this rank's share of the prompts; nothing is collective."""
    count, ranks, rank = len(prompts), distributed.size(), distributed.rank()
    places = range(count * rank // ranks, count * (rank + 1) // ranks)
    if not places:
        return Rollout()
    own = prompts[places.start : places.stop]
    return rollout.generate(policy, own, options, places=places, **others)


def score(
    reward_set: RewardSet,
    examples: Sequence[Example],
    texts: Sequence[str],
    ids: Sequence[list[int]] | None = None,
    prompt_texts: Sequence[str] | None = None,
) -> RewardResult:
    """`rewards.score` by rank 0: a function sees the batch that it would see in one process."""
    if distributed.size() == 1:
        return rewards.score(reward_set, examples, texts, ids, prompt_texts)

    with distributed.together():
        is_main = distributed.is_main()
        given = reward_set, examples, texts, ids, prompt_texts
        own = rewards.score(*given) if is_main else None
    plain, tensors = _gathered(own)[0]
    return TypeAdapter(RewardResult).validate_python(plain, context=tensors)


def join_ranks(own: Rollout, group_size: int) -> Rollout:
    """Gather the rollouts of all ranks into one, in the order of their prompts."""
    if distributed.size() == 1:
        return own
    short = {name: getattr(own, name)[::group_size] for name in OF_A_GROUP}
    every = Rollout()
    for plain, tensors in _gathered(dataclasses.replace(own, **short)):
        for name in OF_A_GROUP:
            plain[name] = [one for one in plain[name] for _ in range(group_size)]
        part = TypeAdapter(Rollout).validate_python(plain, context=tensors)
        for name, values in vars(part).items():
            getattr(every, name).extend(values)
    return every


def _gathered(value: Any) -> list[tuple[Any, dict[str, Tensor]]]:
    """A nested value of every rank, as `split_tensors` takes it apart."""
    from safetensors.torch import load, save

    tensors: dict[str, Tensor] = {}
    plain = distributed.gather(split_tensors(value, tensors))
    packed = torch.frombuffer(bytearray(save(tensors)), dtype=torch.uint8)
    data = distributed.gather_tensors(packed)
    return [(p, load(d.numpy().tobytes())) for p, d in zip(plain, data, strict=True)]


def balanced(costs: Sequence[int], ranks: int) -> list[list[int]]:
    """Deal numbers to the ranks, the costliest first, each to the rank with the least so far."""
    # All ranks compute this alone and must agree: of equal costs, and of equal loads, the first.
    hands: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for number in sorted(range(len(costs)), key=lambda i: -costs[i]):
        least = min(range(ranks), key=loads.__getitem__)
        hands[least].append(number)
        loads[least] += costs[number]
    return [sorted(hand) for hand in hands]
