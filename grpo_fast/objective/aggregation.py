"""Aggregations, which define the weight w_t of every token in loss = Σ_t w_t·ℓ_t.

ℓ_t is the loss of token t. The weights are known before the forward pass. If `num_items_in_batch`
and `num_completions_in_batch` contain the totals of the whole optimizer step, loss and gradient do
not depend on how the step is split into micro-batches and ranks. The only exception is
"token_mean_local".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

Total = float | Tensor  # a number, or a 0-d tensor on a device


class Counts(NamedTuple):
    """Counts of tokens and completions, from which an aggregation computes the token weights."""

    active: int  # active tokens of this call, at least 1
    tokens: Total  # num_items_in_batch; if None, `active`
    completions: Total  # num_completions_in_batch; if None, the completions of this call
    max_length: int  # max_completion_length
    group_size: int


class Aggregation(NamedTuple):
    """Rule for the weights of the tokens.

    Attributes:
        total: function that returns the number by which the weights of all tokens are divided.
        by_length: if True, the weight of a token is also divided by the length of its completion.
            For "prompt_mean", it is divided by the number of tokens of all completions of the
            prompt instead.
    """

    total: Callable[[Counts], Total]
    by_length: bool = False


AGGREGATIONS: dict[str, Aggregation] = {
    # In these comments, B is the number of completions. Each token has the weight 1/(B·|o_b|),
    # where |o_b| is the length of its completion. The loss is the mean over completions of their
    # token means (DeepSeekMath).
    "sequence_mean": Aggregation(lambda counts: counts.completions, by_length=True),
    # Each token has the weight 1/(active tokens of this call). The loss is the mean over these
    # tokens (TRL).
    "token_mean_local": Aggregation(lambda counts: counts.active),
    # Each token has the weight 1/(B·max_completion_length), which does not depend on the length of
    # its completion (Dr. GRPO).
    "fixed_length": Aggregation(lambda counts: counts.completions * counts.max_length),
    # Each token has the same weight, 1/(active tokens of the whole optimizer step) (DAPO).
    "token_mean_global": Aggregation(lambda counts: counts.tokens),
    # Each token has the weight 1/(prompts·tokens of all completions of the prompt). The loss is the
    # mean over prompts of their token means (SkyRL).
    "prompt_mean": Aggregation(
        lambda counts: counts.completions / counts.group_size, by_length=True
    ),
    # Each token has the weight 1/B. The loss is the mean over completions of their token sums
    # (LUSPO).
    "sequence_sum": Aggregation(lambda counts: counts.completions),
}


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
        aggregation: a key of `AGGREGATIONS`.
        lengths: (B,), active tokens of each completion of this call. 0 is allowed.
        active: the sum of lengths, known on the host.
        max_completion_length: maximum number of tokens, for "fixed_length".
        num_items_in_batch: active tokens of the whole optimizer step. None: the tokens of this
            call. For "prompt_mean", a (B,) tensor that holds for each completion the number of
            active tokens of all completions of its prompt. None then requires that this call has
            all completions of each prompt, next to each other.
        num_completions_in_batch: completions of the whole optimizer step. None: the completions of
            this call.
        group_size: completions per prompt, for "prompt_mean".

    Returns:
        Weights, (B,), fp32.
    """
    group = group_size or 1
    active = max(active, 1)
    completions = num_completions_in_batch
    if completions is None:
        completions = max(len(lengths), 1)
    if aggregation == "prompt_mean":
        if not isinstance(num_items_in_batch, Tensor):
            num_items_in_batch = lengths.view(-1, group).sum(1).repeat_interleave(group)
        lengths = num_items_in_batch
    tokens = active if num_items_in_batch is None else num_items_in_batch
    total, by_length = AGGREGATIONS[aggregation]
    counts = Counts(active, tokens, completions, max_completion_length or 1, group)
    divisors = lengths.clamp(min=1) if by_length else torch.ones_like(lengths)
    return (1.0 / (divisors.double() * total(counts))).float()
