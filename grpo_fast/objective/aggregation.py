"""Normalisers: the weight w_t of every token in loss = Σ_t w_t·ℓ_t, known before the forward pass.

Each is 1 / (total · own), with one total for the whole step and `own` either 1 or the completion's
length. However a step is split, loss and gradient are the same when `num_items_in_batch` and
`num_completions_in_batch` carry the totals of the whole step (`token_mean_local` excepted).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

Total = float | Tensor  # a number known on the host, or a 0-d tensor on a device


class Counts(NamedTuple):
    """The counts that a normaliser may divide by."""

    active: int  # this call's own active tokens, 1 where there are none
    tokens: Total  # num_items_in_batch, else `active`
    completions: Total  # num_completions_in_batch, else this call's B
    max_length: int  # max_completion_length
    group_size: int


class Aggregation(NamedTuple):
    """w_t = 1 / (total · |o_b|) when `by_length` ("prompt_mean": the prompt's), else 1 / total."""

    total: Callable[[Counts], Total]
    by_length: bool = False


AGGREGATIONS: dict[str, Aggregation] = {
    # 1 / (B·|o_b|): the mean over completions of the mean over tokens (DeepSeekMath)
    "sequence_mean": Aggregation(lambda counts: counts.completions, by_length=True),
    # 1 / Σm of this call
    "token_mean_local": Aggregation(lambda counts: counts.active),
    # 1 / (B·max_completion_length): no length bias (Dr. GRPO)
    "fixed_length": Aggregation(lambda counts: counts.completions * counts.max_length),
    # 1 / Σm of the whole step: every token weighs the same (DAPO)
    "token_mean_global": Aggregation(lambda counts: counts.tokens),
    # 1 / (prompts·tokens of the prompt's completions): the mean over prompts (SkyRL)
    "prompt_mean": Aggregation(
        lambda counts: counts.completions / counts.group_size, by_length=True
    ),
    # 1 / B: the mean over completions of the sum over tokens (LUSPO)
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
    """The weight of every token of each completion, fp32.

    Args:
        aggregation: a name of `AGGREGATIONS`.
        lengths: active tokens of this call's completions, 0 allowed; `active`, their sum, is known
            on the host.
        max_completion_length: tokens, for `fixed_length`.
        num_items_in_batch: active tokens of the whole optimizer step. For `prompt_mean` (B,), those
            of each completion's prompt; None: its completions lie side by side in this call.
        num_completions_in_batch: completions of the whole optimizer step.
        group_size: G completions of a prompt, for `prompt_mean`.
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
    own = lengths.clamp(min=1) if by_length else torch.ones_like(lengths)
    return (1.0 / (own.double() * total(counts))).float()
