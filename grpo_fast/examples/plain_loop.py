"""GRPO in one function: a transformers model, a reward, and a loop.

    python -m grpo_fast.examples.plain_loop

trains a tiny random model to prefer even token ids, and prints the loss and the reward.
"""

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
    """Train a transformers model in place; return the metrics of every update."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.0)
    end = model.config.eos_token_id
    length = prompts.shape[1]
    history = []
    for _ in range(steps):
        # 1. Sample G completions of each prompt; labels are -100 at the prompt and after the end.
        model.eval()
        repeated = prompts.repeat_interleave(group_size, 0)
        input_ids = model.generate(repeated, do_sample=True, top_k=0, max_new_tokens=max_new_tokens)
        is_end = input_ids[:, length:] == end
        after_end = is_end.cumsum(1) - is_end.int() > 0
        completions = input_ids[:, length:].masked_fill(after_end, -100)
        labels = torch.cat([torch.full_like(repeated, -100), completions], 1)
        # 2. Score the completions and compare them within their group.
        rewards = reward(completions)
        advantages = group_advantages(rewards, group_size=group_size)
        # 3. Update several times; the first update's logps are the old ones of the others.
        model.train()
        old_logps = None
        for _ in range(inner_iterations):
            batch = {"input_ids": input_ids, "labels": labels}
            output = policy_loss(model, batch, advantages, config, old_logps=old_logps)
            optimizer.zero_grad()
            output.loss.backward()
            optimizer.step()
            if old_logps is None:
                old_logps = output.logps
            metrics = {"loss": output.loss.detach(), "reward": rewards.mean(), **output.metrics}
            history.append({name: float(value) for name, value in metrics.items()})
    return history


def even_ids(completions: Tensor) -> Tensor:
    """Return the share of even ids in each completion."""
    real = completions >= 0
    return ((completions % 2 == 0) & real).sum(1) / real.sum(1).clamp(min=1)


def main() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, bos_token_id=None, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    prompts = torch.randint(2, 64, (4, 6))
    history = train(
        LlamaForCausalLM(config), prompts, even_ids, LossConfig(loss_type="dapo"), steps=10,
        max_new_tokens=16, learning_rate=3e-3,
    )  # fmt: skip
    for number, metrics in enumerate(history):
        print(f"update {number}: loss {metrics['loss']:+.4f}, reward {metrics['reward']:.3f}")


if __name__ == "__main__":
    main()
