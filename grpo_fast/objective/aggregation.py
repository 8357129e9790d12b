"""The active tokens of a batch, and aggregations, which define the weight of every token.

The loss is Σ_t w_t·ℓ_t with the weight w_t and the loss ℓ_t of token t. The weights are known
before the forward pass.

`num_items_in_batch` and `num_completions_in_batch` are totals. If they cover the whole optimizer
step, the loss and the gradient do not depend on how the step is split into micro-batches and ranks.
The aggregation "token_mean_local" does not use them, so it does depend on the split.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class Tokens(NamedTuple):
    """Inputs of the loss for the T active tokens of B completions, without the current logps.

    Tensors are fp32 unless noted otherwise.
    """

    advantages: Tensor  # (T,)
    token_weights: Tensor  # (T,) w_t of the aggregation
    # Weight of the entropy of each token in the entropy bonus. None: 1/(number of tokens that the
    # entropy mask keeps).
    entropy_weight: float | Tensor | None
    # Function that returns the number of tokens of each completion, (B,) int64. The lengths are
    # computed on first use, because most token-level losses do not need them.
    lengths: Callable[[], Tensor]
    segments: Tensor  # (T,) int64: index of each token's completion
    old_logps: Tensor | None  # (T,)
    ref_logps: Tensor | None  # (T,)
    sampling_logps: Tensor | None  # (T,)
    # 0-d. A power of two by which the loss and its derivatives are multiplied, so that fp16
    # gradients do not underflow. None: 1.
    unit: Tensor | None = None

    def completion_sum(self, x: Tensor) -> Tensor:
        """Return the sum of x (T,) over each completion, (B,) fp64.

        The tokens are added in order, so the result is reproducible.
        """
        # Pass unsafe=True to skip the check of the lengths, which would cost a GPU sync.
        return torch.segment_reduce(x.double(), "sum", lengths=self.lengths(), unsafe=True)

    def completion_mean(self, x: Tensor) -> Tensor:
        """Return the mean of x (T,) over each completion, (B,) fp64.

        An empty completion has mean 0.
        """
        return self.completion_sum(x) / self.lengths().clamp(min=1)

    def to_tokens(self, x: Tensor) -> Tensor:
        """Expand one value per completion (B,) to one value per token (T,) fp32."""
        return x.float()[self.segments]


# The number of tokens or of completions in a whole optimizer step: a number, or a 0-d tensor.
Total = float | Tensor
LEAST_TOTAL = 1e-30  # the weights of a smaller total would be infinite in fp32

AGGREGATIONS = (
    "sequence_mean", "token_mean_local", "fixed_length", "token_mean_global", "sequence_sum",
)  # fmt: skip


def step_weights(
    aggregation: str,
    segments: Tensor,  # (T,)
    lengths: Callable[[], Tensor],
    count: int,
    active: int,
    *,
    max_completion_length: int | None = None,
    num_items_in_batch: Total | None = None,
    num_completions_in_batch: Total | None = None,
) -> Tensor:  # (T,)
    """Compute the weight of each token.

    Args:
        aggregation: one of `AGGREGATIONS`.
        segments: (T,), int64. The index of each token's completion.
        lengths: function that returns the number of active tokens of each completion, (B,). 0 is
            allowed. It is called only if the weights depend on the lengths.
        count: B, the number of completions of this call.
        active: the sum of the lengths, known on the host.
        max_completion_length: maximum number of tokens, for "fixed_length".
        num_items_in_batch: number of active tokens in the whole optimizer step. With None, the
            tokens of this call are counted.
        num_completions_in_batch: number of completions in the whole optimizer step. With None, the
            completions of this call are counted.

    Returns:
        Weights, (T,), fp32.
    """
    total: Total = max(count, 1) if num_completions_in_batch is None else num_completions_in_batch
    # "sequence_sum" has no case below. Its weight is 1/(number of completions). The loss is summed
    # over the tokens of each completion, and then averaged over the completions (LUSPO).
    match aggregation:
        case "sequence_mean":
            # The weight is 1/(number of completions · length of the completion). The loss is
            # averaged over the tokens of each completion, and then over the completions
            # (DeepSeekMath).
            divisors = lengths().clamp(min=1).double() * total  # (B,)
            return (1.0 / divisors).float()[segments]
        case "fixed_length":
            # The weight is 1/(number of completions · max_completion_length), as in Dr. GRPO.
            total = total * (max_completion_length or 1)
        case "token_mean_local":
            # The weight is 1/(active tokens of this call), so the loss is the mean over them (TRL).
            total = max(active, 1)
        case "token_mean_global":
            # The weight is 1/(active tokens of the whole optimizer step), as in DAPO.
            total = max(active, 1) if num_items_in_batch is None else num_items_in_batch
    if isinstance(total, Tensor):
        return (1.0 / total.double()).float().repeat(len(segments))
    return torch.full((len(segments),), 1.0 / total, dtype=torch.float32, device=segments.device)
