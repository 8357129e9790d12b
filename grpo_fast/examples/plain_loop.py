"""GRPO in a plain loop: a transformers model, a reward function and an optimizer.

    python -m grpo_fast.examples.plain_loop

The script starts from a tiny model with random weights and trains it to sample even token ids. It
takes ten seconds of CPU time. At the end, it prints the loss and the reward of each update.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from grpo_fast import LossConfig, group_advantages
from grpo_fast.integrations.causal_lm import policy_loss


def train(
    model: PreTrainedModel,
    prompts: Tensor,  # (N, P)
    reward: Callable[[Tensor], Tensor],  # (N*G, K) -> (N*G,)
    config: LossConfig,
    *,
    steps: int,
    group_size: int = 8,
    inner_iterations: int = 2,
    max_new_tokens: int = 64,
    learning_rate: float = 1e-6,
) -> list[dict[str, float]]:
    """Train a transformers model with GRPO. The model is changed in place.

    Args:
        model: A transformers causal LM.
        prompts: Token ids of N prompts of the same length, shape (N, P).
        reward: Function that computes rewards, shape (N*G,), from the token ids of completions,
            shape (N*G, K). The ids after the end of a completion are -100.
        config: Settings of the loss.
        steps: Number of batches of completions.
        group_size: Number of completions G of each prompt.
        inner_iterations: Number of updates on each batch.
        max_new_tokens: Largest length of a completion.
        learning_rate: Learning rate of AdamW.

    Returns:
        One dictionary of metrics for each update.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.0)
    end = model.config.eos_token_id
    length = prompts.shape[1]
    history = []
    for _ in range(steps):
        # 1. Sample G completions of each prompt. The loss ignores the labels -100, which mark the
        # prompt and all tokens after the end of a completion.
        model.eval()
        repeated = prompts.repeat_interleave(group_size, 0)
        input_ids = model.generate(repeated, do_sample=True, top_k=0, max_new_tokens=max_new_tokens)
        is_end = input_ids[:, length:] == end
        after_end = is_end.cumsum(1) - is_end.int() > 0
        completions = input_ids[:, length:].masked_fill(after_end, -100)
        labels = torch.cat([torch.full_like(repeated, -100), completions], 1)
        # 2. Compute the rewards, and compare them within the completions of each prompt.
        rewards = reward(completions)
        advantages = group_advantages(rewards, group_size=group_size)
        # 3. Update the model. The log-probabilities of the first update are the old
        # log-probabilities of the later updates.
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
    """Return the fraction of even token ids in each completion, shape (N*G,)."""
    real = completions >= 0
    return ((completions % 2 == 0) & real).sum(1) / real.sum(1).clamp(min=1)


def main() -> None:
    """Train a tiny model with random weights, and print the metrics of every update."""
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
    for update, metrics in enumerate(history):
        print(f"update {update}: loss {metrics['loss']:+.4f}, reward {metrics['reward']:.3f}")


if __name__ == "__main__":
    main()
