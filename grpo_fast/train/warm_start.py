"""A short supervised start: a random model learns what a solution looks like."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch

from grpo_fast.attention import PackedGroups, pack_groups
from grpo_fast.rollout import encode_prompts
from grpo_fast.train.config import OptimConfig, WarmStartConfig
from grpo_fast.train.optimizer import Optimizer
from grpo_fast.train.policy import Policy


def warm_start(
    policy: Policy,
    examples: Sequence,
    config: WarmStartConfig,
    *,
    seed: int,
    log: Callable[[int, dict[str, float]], Any] = lambda step, metrics: None,
) -> float:
    """Train on the gold solutions, each ended by EOS; returns the last loss, −mean(logps).

    `log` is called as log(0, metrics) after every step: the run's own steps begin afterwards.

    Raises ValueError when no example has a solution.
    """
    usable = [e for e in examples if e.solution]
    if not usable:
        raise ValueError("warm_start: expected examples with a solution, came none")
    optim = OptimConfig(lr=config.lr, schedule="cosine", warmup=config.warmup, weight_decay=0.01)
    optimizer = Optimizer(policy.trainable(), optim, config.steps)
    rng = random.Random(f"{seed}/warm start")
    policy.model.train()
    loss = torch.zeros(())
    for step in range(1, config.steps + 1):
        packed = pack_solutions(policy, rng.sample(usable, min(config.batch_size, len(usable))))
        loss = -policy.logps(packed).mean()
        loss.backward()
        optimizer.step()
        log(0, {"warm_start/step": float(step), "warm_start/loss": loss.item()})
    return loss.item()


def pack_solutions(policy: Policy, examples: Sequence) -> PackedGroups:
    """Prompts with their gold solutions, each ended by EOS, in place of sampled completions."""
    _, prompt_ids = encode_prompts(policy.tokenizer, [e.prompt for e in examples])
    solutions = [
        policy.tokenizer(e.solution, add_special_tokens=False)["input_ids"] for e in examples
    ]
    eos = policy.tokenizer.eos_token_id
    return pack_groups(
        [(p, [ids + [eos]]) for p, ids in zip(prompt_ids, solutions, strict=True)],
        device=policy.device,
    )
