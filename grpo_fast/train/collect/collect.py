"""What a step learns from: completions with their rewards and advantages."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from grpo_fast import group_advantages
from grpo_fast.data import Example
from grpo_fast.objective.baseline import RunningBaseline, split_options
from grpo_fast.rewards import RewardResult, RewardSet
from grpo_fast.rollout import Engine, Rollout
from grpo_fast.train.collect.groups import Drawn, difficulties, uses_of
from grpo_fast.train.collect.prompts import PromptQueue
from grpo_fast.train.config import RunConfig
from grpo_fast.train.config.run import GAE
from grpo_fast.train.metrics.losses import Clock, completion_metrics, kept_metrics, reward_metrics
from grpo_fast.train.models.policy import Policy
from grpo_fast.train.ranks.rollouts import generate, score


class Collected(NamedTuple):
    """N·G scored completions, the G of a prompt side by side."""

    rollout: Rollout
    examples: list[Example]  # of each completion (so each G times)
    scores: RewardResult
    advantages: Tensor  # (N·G,) fp32
    metrics: dict[str, float]  # of all that was sampled, dropped groups included
    generated: int  # tokens, likewise
    prompts: list[dict[str, Any]]  # of each prompt that was asked, for prompts.jsonl


def collect(
    policy: Policy,
    queue: PromptQueue,
    rewards: RewardSet,
    config: RunConfig,
    step: int,
    clock: Clock,
    baseline: RunningBaseline | None = None,
    engine: Engine | None = None,
    ahead: Rollout | None = None,
) -> Collected:
    """G completions of each of the next prompts, and what they are worth.

    With `rollout.dynamic` a group whose rewards are all alike is dropped, and a following prompt is
    asked in its place, for some rounds; what is then still missing is filled with dropped groups.
    A running baseline takes in the rewards of all that was sampled, after the advantages are made.
    The engine samples with the weights it has; None: the policy does it itself. `ahead` is what the
    step's first prompts were answered with before.
    """
    dynamic, size = config.rollout.dynamic, config.rollout.group_size
    wanted = config.rollout.prompts_per_step
    drawn = _draw(policy, queue, wanted, rewards, config, (config.seed, step), clock, engine, ahead)
    uses, metrics = ["kept"] * wanted, {}
    judged_by = None if dynamic is None else dynamic.judged_by
    if dynamic is not None:
        uses, rounds = uses_of(drawn.judged(judged_by), wanted), 0
        while "filled" in uses and rounds < dynamic.rounds:
            rounds += 1
            # The round's place in the training set tells its random numbers from the others'.
            seed, missing = (config.seed, step, queue.consumed), uses.count("filled")
            more = _draw(policy, queue, missing, rewards, config, seed, clock, engine)
            drawn = drawn.joined(more)
            uses = uses_of(drawn.judged(judged_by), wanted)
        metrics = {
            "dynamic_sampling/asked": float(len(uses)),
            "dynamic_sampling/dropped": float(uses.count("dropped")),
            "dynamic_sampling/filled": float(uses.count("filled")),
            "dynamic_sampling/rounds": float(rounds),
            "prompts_consumed": float(queue.consumed),
        }
    chosen = drawn.select([i for i, use in enumerate(uses) if use != "dropped"])
    advantages = advantages_of(chosen.scores.total, chosen.rollout, config, baseline)
    if baseline is not None:
        baseline.update(drawn.scores.total)
    if engine is not None:
        metrics |= staleness(drawn.rollout, step, most=config.rollout.ahead)
    return Collected(
        chosen.rollout,
        [one.example for one in chosen.asked for _ in range(size)],
        chosen.scores,
        advantages,
        {
            **reward_metrics(drawn.scores, size),
            **completion_metrics(drawn.rollout),
            **kept_metrics(drawn.rollout),
            **metrics,
        },
        sum(drawn.rollout.lengths),
        difficulties(drawn.asked, drawn.judged(judged_by), uses, step),
    )


def _draw(
    policy: Policy,
    queue: PromptQueue,
    count: int,
    rewards: RewardSet,
    config: RunConfig,
    seed: tuple[int, ...],
    clock: Clock,
    engine: Engine | None,
    ahead: Rollout | None = None,
) -> Drawn:
    """Groups of the next `count` prompts."""
    size, asked = config.rollout.group_size, queue.take(count)
    prompts, rollout = [one.example.prompt for one in asked], ahead
    if rollout is None:
        rollout = generate(
            policy, prompts, config.rollout, group_size=size, seed=seed, engine=engine
        )
    clock.lap("rollout")
    repeated = [one.example for one in asked for _ in range(size)]
    scores = score(rewards, repeated, rollout.texts, rollout.completion_ids)
    clock.lap("reward")
    return Drawn(asked, rollout, scores)


def advantages_of(
    rewards: Tensor, rollout: Rollout, config: RunConfig, baseline: RunningBaseline | None = None
) -> Tensor:
    """(N·G,) advantages; `opo` weighs its baseline by the completions' lengths.

    With a critic they come later, token by token: until then the rewards stand in their place.
    """
    if config.advantages == GAE:
        return rewards.float()
    options, _ = split_options(config.advantages, config.advantage_options)
    if baseline is not None:
        options["value"] = baseline.value
    if config.advantages == "opo":
        options["lengths"] = torch.tensor(rollout.lengths)
    size = config.rollout.group_size
    return group_advantages(rewards, config.advantages, group_size=size, **options)


def staleness(rollout: Rollout, step: int, most: int) -> dict[str, float]:
    """`sampling/staleness/…`: how many steps older a completion's weights are than the step's.

    Nothing where there is nothing to see, with most = 0.

    Raises:
        RuntimeError: some are older than `most`.
    """
    ages = [step - 1 - version for version in rollout.weight_versions]
    if max(ages) > most:
        expected = f"expected completions of weights at most {most} steps old (rollout.ahead)"
        raise RuntimeError(f"rollout: {expected} in step {step}, got some of {max(ages)}")
    if most == 0:
        return {}
    return {
        "sampling/staleness/mean": sum(ages) / len(ages),
        "sampling/staleness/max": float(max(ages)),
    }
