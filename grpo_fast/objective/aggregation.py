"""Aggregations, which define the weight w_t of every token in loss = Σ_t w_t·ℓ_t.

ℓ_t is the loss of token t. The weights are known before the forward pass. If `num_items_in_batch`
and `num_completions_in_batch` are the totals of the whole optimizer step, loss and gradient do not
depend on how the step is split into micro-batches and ranks. Only "token_mean_local" does depend on
the split.
"""

from __future__ import annotations

import torch
from torch import Tensor

Total = float | Tensor  # a number, or a 0-d tensor on a device


AGGREGATIONS = (
    "sequence_mean", "token_mean_local", "fixed_length", "token_mean_global", "prompt_mean",
    "sequence_sum",
)  # fmt: skip


def step_weights(
    aggregation: str,
    lengths: Tensor,  # (B,)
    active: int,
    *,
    max_completion_length: int | None = None,
    num_items_in_batch: Total | None = None,
    num_completions_in_batch: Total | None = None,
    group_size: int | None = None,
) -> Tensor:  # (B,)
    """Compute the weight of the tokens of each completion.

    Args:
        aggregation: one of `AGGREGATIONS`.
        lengths: (B,), active tokens of each completion of this call. 0 is allowed.
        active: the sum of lengths, known on the host.
        max_completion_length: maximum number of tokens, for "fixed_length".
        num_items_in_batch: active tokens of the whole optimizer step. None: the tokens of this
            call. For "prompt_mean", a (B,) tensor that holds for each completion the number of
            active tokens of all completions of its prompt. If it is None, this call must have all
            completions of each prompt, next to each other.
        num_completions_in_batch: completions of the whole optimizer step. None: the completions of
            this call.
        group_size: completions per prompt, for "prompt_mean".

    Returns:
        Weights, (B,), fp32.
    """
    group = group_size or 1
    items = num_items_in_batch
    total: Total = max(len(lengths), 1)
    if num_completions_in_batch is not None:
        total = num_completions_in_batch
    divisors: Tensor | None = None  # (B,); None: all divisors are 1
    # "sequence_sum" has no case below. Its weight is 1/(completions), so the loss is the mean over
    # completions of their token sums (LUSPO).
    match aggregation:
        case "sequence_mean":
            # The weight is 1/(completions·length of the completion), so the loss is the mean over
            # completions of their token means (DeepSeekMath).
            divisors = lengths.clamp(min=1)
        case "fixed_length":
            # The weight is 1/(completions·max_completion_length), as in Dr. GRPO.
            total = total * (max_completion_length or 1)
        case "token_mean_local":
            # The weight is 1/(active tokens of this call), so the loss is the mean over them (TRL).
            total = max(active, 1)
        case "token_mean_global":
            # The weight is 1/(active tokens of the whole optimizer step), as in DAPO.
            total = max(active, 1) if items is None else items
        case "prompt_mean":
            # The weight is 1/(prompts·active tokens of the prompt), so the loss is the mean over
            # prompts of their token means (SkyRL).
            if not isinstance(items, Tensor):
                items = lengths.view(-1, group).sum(1).repeat_interleave(group)
            divisors = items.clamp(min=1)
            total = total / group
    if divisors is not None:
        return (1.0 / (divisors.double() * total)).float()
    if isinstance(total, Tensor):
        return (1.0 / total.double()).float().expand(len(lengths))
    return torch.full((len(lengths),), 1.0 / total, dtype=torch.float32, device=lengths.device)
