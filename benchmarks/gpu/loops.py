"""slice_kernel with other loops than the shipped one, as candidates.

    flatten      one pipelined loop over tiles and depth: the loads of the next tile run under the
                 epilogue of this one
    specialize   warps of their own for the loads, and two groups of four for 64 rows each
                 (Hopper, with TMA)

The source is the shipped kernel's with some lines replaced, so that it follows what is shipped; a
line that is not there any more is refused. Both forms give the shipped kernel's bits.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import linecache
from collections.abc import Iterator
from typing import Any

import torch
import triton

from benchmarks.gpu.patch import patched
from grpo_fast.kernels.gpu import linear


def descriptor(name: str, sizes: str, stride: str, tile: str) -> str:
    made = f"tl.make_tensor_descriptor({name}, [{sizes}], [{stride}, 1], [{tile}])"
    return f"    {name} = {made}\n"


BLOCKS = "    row_blocks, slices = tl.cdiv(n_rows, BLOCK_T), tl.cdiv(V, slice_columns)\n"
# The compiler halves the rows of a descriptor between two groups of warps only where it sees it
# being made.
DESCRIPTORS = (
    descriptor("hidden", "n_rows, H", "stride_hidden_t", "BLOCK_T, BLOCK_H")
    + descriptor("weight", "V, H", "stride_weight_v", "BLOCK_V, BLOCK_H")
    + "    if STORE_TMA:\n    "
    + descriptor("out", "n_rows, V", "stride_out_t", "BLOCK_T, BLOCK_V // PARTS")
)
REPLACED: dict[str, list[tuple[str, str]]] = {
    "flatten": [("tl.range(first, stop, BLOCK_V)", "tl.range(first, stop, BLOCK_V, flatten=True)")],
    "specialize": [
        (BLOCKS, DESCRIPTORS + BLOCKS),
        ("tl.range(0, H, BLOCK_H)", "tl.range(0, H, BLOCK_H, warp_specialize=True)"),
        ("STORE_TMA, BRANCH, BLOCK_T", "STORE_TMA, False, BLOCK_T"),  # a branch is not specialised
    ],
}
SPECIALIZED_WARPS = 4  # of each group; the compiler adds the others


@functools.cache
def kernel(loop: str) -> Any:
    """The shipped kernel with this loop.

    Raises:
        ValueError: a line to replace that the shipped source does not hold exactly once.
    """
    source = inspect.getsource(linear.slice_kernel.fn)
    for old, new in REPLACED[loop]:
        if source.count(old) != 1:
            raise ValueError(f"{loop}: expected {old!r} once in slice_kernel")
        source = source.replace(old, new)
    file = f"<slice_kernel, {loop}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    names = dict(vars(linear))
    exec(compile(source, file, "exec"), names)
    return names["slice_kernel"]


@contextlib.contextmanager
def using_loop(loop: str) -> Iterator[None]:
    """Inside, passes that give statistics take this loop; the guard of far rows keeps its own."""
    shipped = linear.sweep

    def sweep(*args: Any, **options: Any) -> None:
        changes: dict[str, Any] = {"slice_kernel": kernel(loop)}
        if loop == "specialize":
            config = linear.linear_config
            changes["tiles"] = lambda matrix, rows, columns: matrix
            changes["linear_config"] = lambda *args, **options: config(*args, **options)._replace(
                num_warps=SPECIALIZED_WARPS
            )
            triton.set_allocator(descriptor_memory)
        with patched(linear, **changes):
            shipped(*args, **options)

    with patched(linear, sweep=sweep):
        yield


def descriptor_memory(size: int, alignment: int, stream: int | None) -> torch.Tensor:
    """For the descriptors that a kernel makes itself."""
    return torch.empty(size, dtype=torch.uint8, device="cuda")
