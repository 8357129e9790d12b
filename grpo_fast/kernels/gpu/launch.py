"""Launch function of the Triton kernels, and types and helpers that several kernels share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from grpo_fast.kernels.types import LogitTransform, RowStats

if TYPE_CHECKING:
    from triton import JITFunction


# Compiled kernels, and the compile-time arguments that their launches need. The keys contain
# everything on which Triton specialises a kernel.
_compiled: dict[tuple[object, ...], tuple[Any, tuple[object, ...]]] = {}


def launch(kernel: JITFunction, programs: int, *args: object, **options: object) -> None:
    """Launch `programs` programs of a kernel on the device of its first tensor.

    Without programs, do nothing, because Triton cannot launch an empty grid. Tests replace this
    function.

    `kernel[grid](...)` binds its arguments by name and looks for the compiled kernel in every call.
    The compiled kernel that it returns is called directly in later launches, which takes the host
    less time. Arguments must be in the order of the kernel's parameters, with compile-time
    arguments at the end.
    """
    if not programs:
        return
    tensor = next(arg for arg in args if isinstance(arg, Tensor))
    device = tensor.get_device()
    key = (id(kernel), device, *map(_specialisation, args), *options.values())
    found = _compiled.get(key)
    with torch.cuda.device_of(tensor):
        if found is not None:
            compiled, constants = found
            compiled[programs, 1, 1](*args, *constants)
            return
        # Disable fused multiply-add. The compiler would use it in some kernels but not in others,
        # so two kernels could give bitwise different results for the same row (see rows.py).
        compiled = kernel[(programs,)](*args, enable_fp_fusion=False, **options)
    if compiled is not None:  # the interpreter compiles nothing
        names = kernel.arg_names[len(args) :]
        _compiled[key] = compiled, tuple(options[name] for name in names)


def _specialisation(x: Any) -> object:
    """Return the properties of a kernel argument for which Triton compiles a different kernel."""
    if x is None or isinstance(x, float):
        return type(x)
    if isinstance(x, Tensor):
        return x.dtype, x.data_ptr() % 16
    if isinstance(x, int):
        return 1 if x == 1 else (x % 16 == 0, -(2**31) <= x < 2**31)
    # A tensor descriptor.
    return x.base.dtype, *x.block_shape


def ceil_div(a: int, b: int) -> int:
    """Return a / b, rounded up. triton.cdiv takes ten times as long on the host."""
    return -(-a // b)


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
    descriptors: dict[tuple[int, int, int], Any]  # made by `linear.tiles`, for several launches


def is_aligned(matrix: Tensor) -> bool:
    """Return whether all rows are contiguous and start at multiples of 16 bytes.

    Vector loads and TMA require this.
    """
    row_bytes = matrix.stride(0) * matrix.element_size()
    return matrix.stride(1) == 1 and row_bytes % 16 == 0 and matrix.data_ptr() % 16 == 0
