"""The active tokens of a batch, with sums and means over completions."""

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
