"""The active tokens of a batch as the objectives see them, and sums over their completions."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Tokens(NamedTuple):
    """The inputs of the objective for every active token, beside its logp; fp32 unless said."""

    advantages: Tensor  # (T,)
    token_weights: Tensor  # (T,) w_t of the aggregation
    # 1/N of the entropy bonus; None: 1/(tokens the entropy mask keeps).
    entropy_weight: float | Tensor | None
    lengths: Tensor  # (B,) int64
    segments: Tensor  # (T,) int64: the completion of each token
    old_logps: Tensor | None  # (T,)
    ref_logps: Tensor | None  # (T,)
    sampling_logps: Tensor | None  # (T,)
    # 0-d power of two by which the loss and its coefficients are multiplied.
    unit: Tensor | None = None

    def scaled(self, unit: Tensor) -> Tokens:
        return self._replace(token_weights=self.token_weights * unit, unit=unit)

    def completion_sum(self, x: Tensor) -> Tensor:
        """(T,) → (B,): the sum over each completion, in fp64 and in token order (deterministic)."""
        # unsafe: the lengths are not checked, for which a GPU would be waited.
        return torch.segment_reduce(x.double(), "sum", lengths=self.lengths, unsafe=True)

    def completion_mean(self, x: Tensor) -> Tensor:
        """(T,) → (B,): the mean over each completion, 0 where it is empty (fp64)."""
        return self.completion_sum(x) / self.lengths.clamp(min=1)

    def to_tokens(self, x: Tensor) -> Tensor:
        """(B,) → (T,): each completion's value at its tokens."""
        return x.float()[self.segments]
