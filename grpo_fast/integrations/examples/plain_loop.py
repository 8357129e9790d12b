"""GRPO in one function: a transformers model, a reward, and a loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from grpo_fast import LossConfig, group_advantages
from grpo_fast.integrations.causal_lm import policy_loss


def train(
    model: Any,
    prompts: Tensor,  # (N, P) ids, all of one length
    reward: Callable[[Tensor], Tensor],  # completions (N·G, K), -100 after their end → (N·G,)
    config: LossConfig,
    *,
    steps: int,
    group_size: int = 8,
    inner_iterations: int = 2,
    max_new_tokens: int = 64,
    learning_rate: float = 1e-6,
) -> list[dict[str, float]]:
    """Train `model` in place; returns the metrics of every update."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.0)
    end, history = model.config.eos_token_id, []
    for _ in range(steps):
        model.eval()
        input_ids = model.generate(
            prompts.repeat_interleave(group_size, 0),
            do_sample=True,
            top_k=0,
            max_new_tokens=max_new_tokens,
        )
        completions = input_ids[:, prompts.shape[1] :]
        after_end = (completions == end).cumsum(1) - (completions == end).int() > 0
        completions = completions.masked_fill(after_end, -100)
        rewards = reward(completions)
        advantages = group_advantages(rewards, group_size=group_size)
        labels = torch.cat(
            [torch.full_like(input_ids[:, : prompts.shape[1]], -100), completions], 1
        )
        batch = {"input_ids": input_ids, "labels": labels}
        model.train()
        old_logps = None  # the first update computes them anyway
        for _ in range(inner_iterations):
            output = policy_loss(model, batch, advantages, config, old_logps=old_logps)
            optimizer.zero_grad()
            output.loss.backward()
            optimizer.step()
            old_logps = output.logps if old_logps is None else old_logps
            history.append(
                {"reward": float(rewards.mean())} | {k: float(v) for k, v in output.metrics.items()}
            )
    return history
