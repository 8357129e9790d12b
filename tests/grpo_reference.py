"""Simple reference implementation of GRPO in plain torch.

The reference computes all logits of a transformers model. Tests compare the package with it.
"""

from typing import Any

import torch
from torch import Tensor


def token_logps(model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the log-probabilities and the entropies of a batch.

    Returns:
        (logps, entropy, mask), each (B, L-1). The mask is False where the label is -100.
    """
    targets = batch["labels"][:, 1:]
    logits = (
        model(input_ids=batch["input_ids"], attention_mask=batch.get("attention_mask"))
        .logits[:, :-1]
        .float()
    )
    logp_all = logits.log_softmax(-1)
    logps = logp_all.gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    return logps, -(logp_all.exp() * logp_all).sum(-1), targets != -100


def group_advantages(rewards: Tensor, group_size: int, eps: float = 1e-4) -> Tensor:
    groups = rewards.view(-1, group_size)
    return ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + eps)).flatten()


def grpo(
    model: Any, batch: dict[str, Tensor], advantages: Tensor, old: Tensor | None,
    ref: Tensor | None, *, epsilon: float = 0.2, beta: float = 0.0, by_token: bool = False,
    num_items: float | None = None,
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:  # fmt: skip
    """Compute the clipped GRPO objective, and return (loss, logps, metrics).

    By default, the per-token loss is averaged over the tokens of each completion and then over the
    completions. If `by_token` is True, it is averaged over all tokens of the batch.
    """
    logps, entropy, mask = token_logps(model, batch)
    ratio = torch.exp(logps - (logps.detach() if old is None else old))
    a = advantages[:, None].expand_as(ratio)
    per_token = -torch.minimum(ratio * a, ratio.clamp(1 - epsilon, 1 + epsilon) * a)
    metrics = {"ratio/mean": ratio[mask].mean(), "entropy": entropy[mask].mean()}
    low, high = (ratio < 1 - epsilon) & (a < 0), (ratio > 1 + epsilon) & (a > 0)
    for name, clipped in (("low", low), ("high", high), ("region", low | high)):
        metrics[f"clip_ratio/{name}_mean"] = clipped[mask].float().mean()
    if ref is not None:
        kl = torch.exp(ref - logps) - (ref - logps) - 1
        per_token = per_token + beta * kl
        metrics["kl"] = kl[mask].mean()
    per_token = torch.where(mask, per_token, 0.0)
    if by_token:
        loss = per_token.sum() / (mask.sum() if num_items is None else num_items)
    else:
        loss = (per_token.sum(1) / mask.sum(1).clamp(min=1)).mean()
    return loss, logps.detach(), {name: value.detach() for name, value in metrics.items()}


def rows(
    count: int = 8, length: int = 14, vocabulary: int = 61, seed: int = 0
) -> dict[str, Tensor]:
    """Return a random right-padded batch with rewards.

    The rows have prompts and completions of different lengths.
    """
    random = torch.Generator().manual_seed(seed)
    ids = torch.randint(2, vocabulary, (count, length), generator=random)
    real = torch.arange(length) < torch.randint(
        length - 4, length + 1, (count, 1), generator=random
    )
    prompt = torch.arange(length) < torch.randint(2, 6, (count, 1), generator=random)
    return {
        "input_ids": ids,
        "attention_mask": real.long(),
        "labels": torch.where(real & ~prompt, ids, -100),
        "rewards": torch.randint(0, 4, (count,), generator=random).float(),
    }
