"""One call of a kernel that starts from hidden, as every one of them takes it."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from grpo_fast.kernels.types import LogitRule


class Problem(NamedTuple):
    """One call: hidden on 16-byte rows, target ids contiguous (linear.problem makes it)."""

    hidden: Tensor  # (T, H)
    weight: Tensor  # (V, H)
    bias: Tensor | None  # (V,)
    target_ids: Tensor  # (T,)
    rule: LogitRule

    @property
    def is_light(self) -> bool:
        """Neither soft cap nor bias: an epilogue of few registers."""
        return self.rule.softcap is None and self.bias is None


def is_aligned(matrix: Tensor) -> bool:
    """Contiguous rows that start on 16 bytes, for vector loads and tensor descriptors."""
    row_bytes = matrix.stride(0) * matrix.element_size()
    return matrix.stride(1) == 1 and row_bytes % 16 == 0 and matrix.data_ptr() % 16 == 0
