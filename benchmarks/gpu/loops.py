"""Candidates for the loop of `slice_kernel`. Their results must be bit-equal to the shipped loop's.

    flatten      one pipelined loop over tiles and depth, so that the loads of the next tile overlap
                 with the epilogue of the current tile

A candidate is the source of the shipped kernel with some lines replaced, so it follows every change
of the kernel. Warp specialization is not a candidate, because it does not compile with Triton 3.6,
the version on the GPU machine.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import linecache
from collections.abc import Iterator
from typing import Any

from benchmarks.gpu.patch import patched
from grpo_fast.kernels.gpu import linear

REPLACED: dict[str, list[tuple[str, str]]] = {
    "flatten": [("tl.range(first, stop, BLOCK_V)", "tl.range(first, stop, BLOCK_V, flatten=True)")]
}


def kernel(loop: str) -> Any:
    """Return a copy of the shipped kernel with a loop of `REPLACED`."""
    return rewritten(tuple(REPLACED[loop]))


@functools.cache
def rewritten(replaced: tuple[tuple[str, str], ...], **names: Any) -> Any:
    """Return the shipped kernel with some text of its source replaced.

    Args:
        replaced: pairs of the old and the new text.
        names: objects that the new text may use, keyed by name.

    Raises:
        ValueError: the source does not contain an old text exactly once.
    """
    source = inspect.getsource(linear.slice_kernel.fn)
    for old, new in replaced:
        if source.count(old) != 1:
            got = source.count(old)
            raise ValueError(f"slice_kernel: expected {old!r} once in the source, got {got} times")
        source = source.replace(old, new)
    file = f"<slice_kernel with {' '.join(new for _, new in replaced)}>"
    # Add the source to linecache, from which Triton reads the source of a kernel.
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    scope = {**vars(linear), **names}
    exec(compile(source, file, "exec"), scope)
    return scope["slice_kernel"]


@contextlib.contextmanager
def using_loop(loop: str) -> Iterator[None]:
    """Use a loop of `REPLACED` for `linear.sweep` in a `with` block.

    The second pass over rows with unlikely targets keeps the shipped loop.
    """
    shipped = linear.sweep

    def sweep(*args: Any, **options: Any) -> None:
        with patched(linear, slice_kernel=kernel(loop)):
            shipped(*args, **options)

    with patched(linear, sweep=sweep):
        yield
