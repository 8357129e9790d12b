"""The active tokens of a batch, with sums and means over completions."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Tokens(NamedTuple):
    """Inputs of the objective for every active token, except its logp. fp32 unless noted."""

    advantages: Tensor  # (T,)
    token_weights: Tensor  # (T,) w_t of the aggregation
    # Factor of each entropy in the bonus; None: 1/(number of tokens kept by the entropy mask).
    entropy_weight: float | Tensor | None
    lengths: Tensor  # (B,) int64
    segments: Tensor  # (T,) int64: completion of each token
    old_logps: Tensor | None  # (T,)
    ref_logps: Tensor | None  # (T,)
    sampling_logps: Tensor | None  # (T,)
    # 0-d power of two that multiplies the loss and its derivatives; None: 1.
    unit: Tensor | None = None

    def scaled(self, unit: Tensor) -> Tokens:
        """Return the tokens with weights multiplied by `unit`."""
        return self._replace(token_weights=self.token_weights * unit, unit=unit)

    def completion_sum(self, x: Tensor) -> Tensor:
        """Sum (T,) over each completion, (B,), in fp64 and in token order, so that the result is
        deterministic.
        """
        # unsafe=True skips the check of the lengths, which would cost a GPU sync.
        return torch.segment_reduce(x.double(), "sum", lengths=self.lengths, unsafe=True)

    def completion_mean(self, x: Tensor) -> Tensor:
        """Average (T,) over each completion, (B,) in fp64; 0 for an empty completion."""
        return self.completion_sum(x) / self.lengths.clamp(min=1)

    def to_tokens(self, x: Tensor) -> Tensor:
        """Expand one value per completion (B,) to its tokens (T,)."""
        return x.float()[self.segments]
