"""Normalisers: the weight w_t of every token in loss = Σ_t w_t·ℓ_t, known before the forward pass.

A step that is split into micro-batches or ranks gives the same loss and gradient however it is split when
`num_items_in_batch` and `num_completions_in_batch` carry the totals of the whole step (`token_mean_local` excepted).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Total = int | Tensor  # a count of this call, known on the host, or a 0-d tensor from the caller


def sequence_mean(lengths: Tensor, tokens: Total, completions: Total, max_length: int | None) -> Tensor:
    """1 / (B·|o_b|): the mean over completions of the mean over tokens (DeepSeekMath)."""
    return 1.0 / (lengths.clamp(min=1) * completions)


def token_mean(lengths: Tensor, tokens: Total, completions: Total, max_length: int | None) -> Tensor:
    """1 / Σm: every token weighs the same (DAPO); Σm is the step's or this call's, see `completion_weights`."""
    return _everywhere(tokens, lengths)


def fixed_length(lengths: Tensor, tokens: Total, completions: Total, max_length: int | None) -> Tensor:
    """1 / (B·max_completion_length): no length bias (Dr. GRPO)."""
    assert max_length is not None
    return _everywhere(completions * max_length, lengths)


def sequence_sum(lengths: Tensor, tokens: Total, completions: Total, max_length: int | None) -> Tensor:
    """1 / B: the mean over completions of the sum over tokens (LUSPO)."""
    return _everywhere(completions, lengths)


def _everywhere(total: Total, lengths: Tensor) -> Tensor:
    """(B,) 1 / total for every completion."""
    if isinstance(total, Tensor):
        return (1.0 / total.double()).expand(lengths.shape)
    return lengths.new_full(lengths.shape, 1.0 / max(total, 1), dtype=torch.float32)


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
    num_tokens: int,
    *,
    max_completion_length: int | None = None,
    num_items_in_batch: Tensor | None = None,  # 0-d: tokens of the whole step
    num_completions_in_batch: Tensor | None = None,  # 0-d: completions of the whole step
) -> Tensor:
    """The weight w_t shared by all tokens of each completion.

    Args:
        aggregation: a name of `AGGREGATIONS`.
        lengths: (B,) number of active tokens of each completion; an empty completion counts in B.
        num_tokens: their sum, T.
        max_completion_length: tokens, for `fixed_length`.
        num_items_in_batch: active tokens of the whole optimizer step; this call's own sum when None.
            `token_mean_local` ignores it by definition.
        num_completions_in_batch: completions of the whole optimizer step; this call's own B when None.

    Returns:
        (B,) fp32 weights.
    """
    own_tokens = aggregation == "token_mean_local" or num_items_in_batch is None
    tokens: Total = num_tokens if own_tokens or num_items_in_batch is None else num_items_in_batch
    completions: Total = max(lengths.shape[0], 1) if num_completions_in_batch is None else num_completions_in_batch
    return AGGREGATIONS[aggregation](lengths, tokens, completions, max_completion_length).float()
