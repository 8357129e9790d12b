"""How a Triton kernel is started, and the arguments that all of them take alike."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from grpo_fast.kernels.types import LogitTransform, RowStats


def launch(kernel: Any, programs: int, *args: object, **options: object) -> None:
    """Start `programs` programs of `kernel` on the device of its first tensor (tests patch it)."""
    tensor = next(arg for arg in args if isinstance(arg, Tensor))
    with torch.cuda.device_of(tensor):
        kernel[(programs,)](*args, enable_fp_fusion=False, **options)


def outputs(of_rows: Tensor, return_entropy: bool) -> RowStats:
    rows, device = of_rows.shape[0], of_rows.device
    lse, logps = (torch.empty(rows, dtype=torch.float32, device=device) for _ in range(2))
    return lse, logps, torch.empty_like(lse) if return_entropy else None


class HeadInputs(NamedTuple):
    """One call: hidden on 16-byte rows, target ids contiguous (linear.head_inputs makes it)."""

    hidden: Tensor  # (T, H)
    weight: Tensor  # (V, H)
    bias: Tensor | None  # (V,)
    target_ids: Tensor  # (T,)
    transform: LogitTransform

    @property
    def is_light(self) -> bool:
        """Neither soft cap nor bias: an epilogue of few registers."""
        return self.transform.softcap is None and self.bias is None


def is_aligned(matrix: Tensor) -> bool:
    """Contiguous rows that start on 16 bytes, for vector loads and tensor descriptors."""
    row_bytes = matrix.stride(0) * matrix.element_size()
    return matrix.stride(1) == 1 and row_bytes % 16 == 0 and matrix.data_ptr() % 16 == 0
