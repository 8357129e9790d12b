"""Normalisers: the weight w_t of every token in loss = Σ_t w_t·ℓ_t, known before the forward pass.

Each is 1 / (total · own), with one total for the whole step and `own` either 1 or the completion's
length. A step that is split into micro-batches or ranks gives the same loss and gradient however it
is split when `num_items_in_batch` and `num_completions_in_batch` carry the totals of the whole step
(`token_mean_local` excepted).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

Total = float | Tensor  # a number known on the host, or a 0-d tensor on a device


class Counts(NamedTuple):
    """The counts that a normaliser may divide by."""

    tokens: Total | None  # num_items_in_batch; None: this call's own number of active tokens
    completions: Total  # num_completions_in_batch, else this call's B
    max_length: int | None  # max_completion_length
    group_size: int | None = None


class Aggregation(NamedTuple):
    """w_t = 1 / (total · |o_b|) when `by_length`, else 1 / total. |o_b| of "prompt_mean" are the
    tokens of the completion's prompt.
    """

    total: Callable[[Counts], Total | None]
    by_length: bool = False


AGGREGATIONS: dict[str, Aggregation] = {
    # 1 / (B·|o_b|): the mean over completions of the mean over tokens (DeepSeekMath)
    "sequence_mean": Aggregation(lambda counts: counts.completions, by_length=True),
    # 1 / Σm of this call
    "token_mean_local": Aggregation(lambda counts: None),
    # 1 / (B·max_completion_length): no length bias (Dr. GRPO)
    "fixed_length": Aggregation(lambda counts: counts.completions * (counts.max_length or 1)),
    # 1 / Σm of the whole step: every token weighs the same (DAPO)
    "token_mean_global": Aggregation(lambda counts: counts.tokens),
    # 1 / (prompts·tokens of the prompt's completions): the mean over prompts (SkyRL)
    "prompt_mean": Aggregation(
        lambda counts: counts.completions / (counts.group_size or 1), by_length=True
    ),
    # 1 / B: the mean over completions of the sum over tokens (LUSPO)
    "sequence_sum": Aggregation(lambda counts: counts.completions),
}


def denominator(
    aggregation: str,
    num_completions: int,
    *,
    max_completion_length: int | None = None,
    num_items_in_batch: Total | None = None,
    num_completions_in_batch: Total | None = None,
    group_size: int | None = None,
) -> Total | None:
    """The total that an aggregation divides by; None for this call's own number of active tokens.

    Args:
        aggregation: a name of `AGGREGATIONS`.
        num_completions: B of this call; an empty completion counts.
        max_completion_length: tokens, for `fixed_length`.
        num_items_in_batch: active tokens of the whole optimizer step.
        num_completions_in_batch: completions of the whole optimizer step.
        group_size: G completions of a prompt, for `prompt_mean`.
    """
    completions = (
        max(num_completions, 1) if num_completions_in_batch is None else num_completions_in_batch
    )
    return AGGREGATIONS[aggregation].total(
        Counts(num_items_in_batch, completions, max_completion_length, group_size)
    )


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
    """The weight of every token of each completion, fp32.

    Args:
        lengths: active tokens of this call's completions; `active`, their sum, is known on the
            host.
        num_items_in_batch: for `prompt_mean` (B,), the active tokens of each completion's prompt in
            the whole step; None: the prompts' completions lie side by side in this call.
        the rest: see `denominator`.
    """
    if aggregation == "prompt_mean":
        if not isinstance(num_items_in_batch, Tensor):
            of_prompts = lengths.view(-1, group_size or 1).sum(1)
            num_items_in_batch = of_prompts.repeat_interleave(group_size or 1)
        lengths = num_items_in_batch
    total = denominator(
        aggregation, lengths.shape[0], max_completion_length=max_completion_length,
        num_items_in_batch=num_items_in_batch, num_completions_in_batch=num_completions_in_batch,
        group_size=group_size,
    )  # fmt: skip
    total = max(active, 1) if total is None else total
    return completion_weights(lengths, total, AGGREGATIONS[aggregation].by_length)


def completion_weights(lengths: Tensor, total: Total, by_length: bool) -> Tensor:
    """(B,) fp32: the weight of every token of each completion, from their (B,) active tokens and
    `denominator`.
    """
    own = lengths.clamp(min=1) if by_length else torch.ones_like(lengths)
    return (1.0 / (own.double() * total)).float()
