"""Launch function of the Triton kernels, and types and helpers that several kernels share."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from grpo_fast.kernels.types import LogitTransform, RowStats

if TYPE_CHECKING:
    from triton import JITFunction


def launch(kernel: JITFunction, programs: int, *args: object, **options: object) -> None:
    """Launch `programs` programs of a kernel on the device of its first tensor.

    Without programs, do nothing, because Triton cannot launch an empty grid. Tests replace this
    function.
    """
    if not programs:
        return
    tensor = next(arg for arg in args if isinstance(arg, Tensor))
    with torch.cuda.device_of(tensor):
        # Disable fused multiply-add. The compiler would use it in some kernels but not in others,
        # so two kernels could give bitwise different results for the same row (see rows.py).
        kernel[(programs,)](*args, enable_fp_fusion=False, **options)


def outputs(of_rows: Tensor, return_entropy: bool) -> RowStats:
    """Allocate lse, logps and, if requested, entropy, with one element per row of `of_rows`."""
    rows, device = of_rows.shape[0], of_rows.device
    lse, logps = (torch.empty(rows, dtype=torch.float32, device=device) for _ in range(2))
    return lse, logps, torch.empty_like(lse) if return_entropy else None


class HeadInputs(NamedTuple):
    """Inputs of an LM head kernel, prepared by `linear.head_inputs`.

    The rows of `hidden` are aligned to 16 bytes.
    """

    hidden: Tensor  # (T, H)
    weight: Tensor  # (V, H)
    bias: Tensor | None  # (V,)
    target_ids: Tensor  # (T,)
    transform: LogitTransform


def is_aligned(matrix: Tensor) -> bool:
    """Return whether all rows are contiguous and start at multiples of 16 bytes.

    Vector loads and TMA require this.
    """
    row_bytes = matrix.stride(0) * matrix.element_size()
    return matrix.stride(1) == 1 and row_bytes % 16 == 0 and matrix.data_ptr() % 16 == 0
