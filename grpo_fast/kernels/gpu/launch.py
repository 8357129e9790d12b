"""Launches of Triton kernels, capture of CUDA graphs, and helpers that several kernels share.

A graph contains kernel launches but no decisions of the host. During capture, the host must
therefore not read tensor values. `linear_grpo_loss`, `logits_grpo_loss`, `grpo_loss`,
`linear_logps`, `logits_logps`, their gradients and `LossOutput.metrics` then behave as follows:

    no compaction    rows with coefficient 0 stay in the GEMMs as exact zeros, so their inputs must
                     be finite; targets of -100 are masked
    no value checks  invalid values in tensors are not reported; ids are clamped into [0, V)

Arguments whose values determine shapes are rejected: `completion_mask`, `grad_filter` and
`validate="full"`. Pack the batch instead of passing a mask. The values of `cu_seqlens` may change
between replays. To disable a completion, set its advantage to 0, use beta = 0 and pass
`num_items_in_batch`. Arguments that are not tensors are captured as constants. Call the function
once before capture, so that its kernels are compiled and loaded. Read `metrics` during capture.

The block sizes are defined in the modules of the kernels. They are constants, because they
determine the order of sums. If they were tuned by timing at run time, noise in the timings could
change the bits of the results. The constants were chosen from the compiler's reports (registers,
spills, tensor-core instructions). tests/kernels/test_triton_compile.py compiles every entry for
sm_80, 90, 100, 120 and gfx942. It requires zero register spills and checks that the shared memory
does not exceed the limit.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from grpo_fast.kernels.types import RowStats

if TYPE_CHECKING:
    from triton import JITFunction


# Number of vocabulary columns that one program processes for a block of rows. These columns are
# called a slice. The number is constant, so that the order of sums, and with it every bit of a
# log-probability, does not depend on the number of rows. The value is a compromise: larger slices
# leave more multiprocessors idle in the last wave of programs, and smaller slices need more
# programs. For example, a 1 GiB chunk at V = 151936 has 2752 rows. On 132 multiprocessors, slices
# of 4096 columns give 6.2 waves of programs, so the seventh wave is nearly empty. Slices of 2048
# columns take 5% less time. Slices of 1024 columns would save another 3%, but would double the
# number of programs.
SLICE_COLUMNS = 2048

# Functions that launch compiled kernels. The keys contain everything on which Triton specialises a
# kernel.
_compiled: dict[tuple[object, ...], Callable[..., None]] = {}


def launch(kernel: JITFunction, programs: int, *args: Any, **options: object) -> None:
    """Launch `programs` programs of a kernel on the device of its tensors.

    Without programs, do nothing, because Triton cannot launch an empty grid. Tests replace this
    function.

    `kernel[grid](...)` binds its arguments by name and looks for the compiled kernel in every call.
    The compiled kernel that it returns is called directly in later launches, which takes the host
    less time. Arguments must be in the order of the kernel's parameters, with compile-time
    arguments at the end.
    """
    if not programs:
        return
    # 1. List the properties for which Triton compiles a different kernel. Calling a function for
    # each argument would take the host twice as long.
    properties: list[object] = [id(kernel), *options.values()]
    add = properties.append
    tensor: Any = None
    for x in args:
        kind = type(x)
        if kind is int:
            add(1 if x == 1 else (x % 16 == 0, -(2**31) <= x < 2**31))
        elif x is None or kind is float:
            add(kind)
        elif isinstance(x, Tensor):
            tensor = x
            add(x.dtype)
            add(x.data_ptr() % 16)
        else:  # a tensor descriptor
            properties += x.base.dtype, *x.block_shape
    device = tensor.get_device()
    if device >= 0 and device != torch.cuda.current_device():
        with torch.cuda.device_of(tensor):
            return launch(kernel, programs, *args, **options)
    key = device, *properties
    start = _compiled.get(key)
    if start is not None:
        return start(programs, device, args)
    # 2. Compile the kernel. Disable fused multiply-add. The compiler would use it in some kernels
    # but not in others, so two kernels could give bitwise different results for the same row (see
    # rows.py).
    compiled = kernel[(programs,)](*args, enable_fp_fusion=False, **options)
    # The interpreter compiles nothing. On AMD, Triton also specialises on the sizes of tensors.
    if compiled is not None and torch.version.hip is None:
        names = kernel.arg_names[len(args) :]
        _compiled[key] = _launcher(compiled, tuple(options[name] for name in names))


def _launcher(compiled: Any, constants: tuple[object, ...]) -> Callable[..., None]:
    """Return a function that launches a compiled kernel with the given compile-time arguments."""
    from triton import knobs
    from triton.runtime import driver

    run, function, packed = compiled.run, compiled.function, compiled.packed_metadata

    def start(programs: int, device: int, args: tuple[object, ...]) -> None:
        enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
        # A hook is a chain of calls, or was replaced by a function or None.
        if getattr(enter, "calls", enter) or getattr(leave, "calls", leave):
            compiled[programs, 1, 1](*args, *constants)  # a profiler is active
            return
        # Call what `compiled[grid]` calls, but without the description of the launch that only a
        # profiler reads.
        stream = driver.active.get_current_stream(device)
        run(programs, 1, 1, stream, function, packed, None, None, None, *args, *constants)

    return start


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Return the number of multiprocessors of a GPU, or 2 if Triton interprets the kernels."""
    is_gpu = device.type == "cuda"
    return torch.cuda.get_device_properties(device).multi_processor_count if is_gpu else 2


def ceil_div(a: int, b: int) -> int:
    """Return a / b, rounded up. triton.cdiv takes ten times as long on the host."""
    return -(-a // b)


def outputs(of_rows: Tensor, return_entropy: bool) -> RowStats:
    """Allocate lse, logps and, if requested, entropy, with one element per row of `of_rows`."""
    lse = torch.empty(of_rows.shape[0], dtype=torch.float32, device=of_rows.device)
    return lse, torch.empty_like(lse), torch.empty_like(lse) if return_entropy else None


def is_aligned(matrix: Tensor) -> bool:
    """Return whether all rows are contiguous and start at multiples of 16 bytes.

    Vector loads and TMA require this.
    """
    row_bytes = matrix.stride(0) * matrix.element_size()
    return matrix.stride(1) == 1 and row_bytes % 16 == 0 and matrix.data_ptr() % 16 == 0


@functools.cache
def architecture(device: torch.device) -> str:
    """Return the device architecture, for example "sm_90" or "gfx942".

    The result is "interpreter" if Triton interprets the kernels on the CPU. Triton decides
    this when it is imported, so the result does not change in a process.
    """
    if os.environ.get("TRITON_INTERPRET") == "1":
        return "interpreter"
    from triton.runtime import driver

    index = device.index if device.type == "cuda" and device.index is not None else -1
    with torch.cuda.device(index):  # Triton reports the current device
        target = driver.active.get_current_target()
    return f"sm_{target.arch}" if target.backend == "cuda" else str(target.arch)


# ---- Capture of CUDA graphs


def is_capturing(x: Tensor) -> bool:
    """Return whether operations on x are being captured into a CUDA graph."""
    if not x.is_cuda:
        return False
    index = x.device.index
    if index is None or index == torch.cuda.current_device():
        return torch.cuda.is_current_stream_capturing()
    with torch.cuda.device_of(x):  # the query below uses the stream of the current device
        return torch.cuda.is_current_stream_capturing()


def refuse(name: str, x: Tensor, value: object, expected: object = None) -> None:
    """Raise ValueError if a CUDA graph captures operations on x and `value` is not `expected`.

    Call this for an argument whose value the host would have to read.
    """
    if (isinstance(value, Tensor) or value != expected) and is_capturing(x):
        came = "a tensor" if isinstance(value, Tensor) else repr(value)
        raise ValueError(
            f"{name}: expected {expected!r} while a CUDA graph is recorded, got {came}"
        )
