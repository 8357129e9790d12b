"""Normalisers: the weight w_t of every token in loss = Σ_t w_t·ℓ_t, known before the forward pass.

A step that is split into micro-batches or ranks gives the same loss and gradient however it is split when
`num_items_in_batch` and `num_completions_in_batch` carry the totals of the whole step (`token_mean_local` excepted).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def sequence_mean(lengths: Tensor, num_tokens: Tensor, num_completions: Tensor, max_length: int | None) -> Tensor:
    """1 / (B·|o_b|): the mean over completions of the mean over tokens (DeepSeekMath)."""
    return 1.0 / (num_completions * lengths.clamp(min=1))


def token_mean(lengths: Tensor, num_tokens: Tensor, num_completions: Tensor, max_length: int | None) -> Tensor:
    """1 / Σm: every token weighs the same (DAPO); Σm is the step's or this call's, see `token_weights`."""
    return (1.0 / num_tokens.clamp(min=1)).expand(lengths.shape)


def fixed_length(lengths: Tensor, num_tokens: Tensor, num_completions: Tensor, max_length: int | None) -> Tensor:
    """1 / (B·max_completion_length): no length bias (Dr. GRPO)."""
    return (1.0 / (num_completions * max_length)).expand(lengths.shape)


def sequence_sum(lengths: Tensor, num_tokens: Tensor, num_completions: Tensor, max_length: int | None) -> Tensor:
    """1 / B: the mean over completions of the sum over tokens (LUSPO)."""
    return (1.0 / num_completions).expand(lengths.shape)


AGGREGATIONS: dict[str, Callable[..., Tensor]] = {
    "sequence_mean": sequence_mean,
    "token_mean_local": token_mean,
    "fixed_length": fixed_length,
    "token_mean_global": token_mean,
    "sequence_sum": sequence_sum,
}


def completion_weights(
    aggregation: str,
    lengths: Tensor,  # (B,) active tokens per completion
    *,
    max_completion_length: int | None = None,
    num_items_in_batch: Tensor | None = None,  # 0-d: tokens of the whole step
    num_completions_in_batch: Tensor | None = None,  # 0-d: completions of the whole step
) -> Tensor:
    """The weight w_t shared by all tokens of each completion.

    Args:
        aggregation: a name of `AGGREGATIONS`.
        lengths: (B,) number of active tokens of each completion; an empty completion counts in B.
        max_completion_length: tokens, for `fixed_length`.
        num_items_in_batch: active tokens of the whole optimizer step; this call's own sum when None.
            `token_mean_local` ignores it by definition.
        num_completions_in_batch: completions of the whole optimizer step; this call's own B when None.

    Returns:
        (B,) fp32 weights.
    """
    own_tokens = aggregation == "token_mean_local" or num_items_in_batch is None
    num_tokens = lengths.sum() if own_tokens else num_items_in_batch
    if num_completions_in_batch is None:
        num_completions_in_batch = lengths.new_tensor(max(lengths.shape[0], 1))
    weights = AGGREGATIONS[aggregation](
        lengths.double(), num_tokens.double(), num_completions_in_batch.double(), max_completion_length
    )
    return weights.to(torch.float32)
