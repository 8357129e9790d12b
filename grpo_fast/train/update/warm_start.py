"""Supervised training on gold solutions, for models with random weights."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from grpo_fast.attention import PackedTree, pack_groups
from grpo_fast.data import Example
from grpo_fast.rollout import encode_prompts
from grpo_fast.train.config import OptimConfig, WarmStartConfig, require
from grpo_fast.train.models.policy import Policy
from grpo_fast.train.ranks import distributed
from grpo_fast.train.update.optimizer import Optimizer

WARMUP = 20  # steps in which the learning rate rises


def warm_start(
    policy: Policy,
    examples: Sequence[Example],
    config: WarmStartConfig,
    *,
    seed: int,
    log: Callable[[int, dict[str, float]], object],
) -> None:
    """Train a policy with supervised learning on gold solutions, each followed by EOS.

    Args:
        policy: the policy to train.
        examples: training examples. Only examples with a solution are used.
        config: the section `warm_start`.
        seed: seed of the order of the examples.
        log: function that is called as log(0, metrics) after every step.

    Raises:
        ValueError: no example has a solution.
    """
    # 1. Select the examples, and build a separate optimizer for the supervised training.
    usable = [e for e in examples if e.solution]
    came = "none; warm_start=null starts without a supervised phase"
    require(usable, "warm_start", "examples with a solution", came)
    optim = OptimConfig(lr=config.lr, schedule="cosine", warmup=WARMUP, weight_decay=0.01)
    optimizer = Optimizer(policy.trainable(), optim, config.steps)
    # 2. Train on random batches of solutions.
    rng = random.Random(f"{seed}/warm start")
    policy.model.train()
    for step in range(1, config.steps + 1):
        chosen = rng.sample(usable, min(config.batch_size, len(usable)))
        with distributed.together():
            loss = -policy.logps(_packed(policy, chosen)).mean()
            # Divide by the number of ranks, because all ranks compute the same gradient and the
            # optimizer sums the gradients over the ranks.
            (loss / distributed.size()).backward()
        optimizer.step()
        log(0, {"warm_start/step": float(step), "warm_start/loss": loss.item()})


def _packed(policy: Policy, examples: Sequence[Example]) -> PackedTree:
    """Pack examples into one row. The completion of a prompt is its solution followed by EOS."""
    prompts = [example.prompt for example in examples]
    prompt_ids = encode_prompts(policy.tokenizer, prompts, policy.template_kwargs)
    texts = (policy.tokenizer(e.solution, add_special_tokens=False) for e in examples)
    solutions = ([*text["input_ids"], policy.tokenizer.eos_token_id] for text in texts)
    groups = [(prompt, [ids]) for prompt, ids in zip(prompt_ids, solutions, strict=True)]
    return pack_groups(groups, device=policy.device)
