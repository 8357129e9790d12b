"""slice_kernel with another loop than the shipped one, as a candidate.

    flatten      one pipelined loop over tiles and depth: the loads of the next tile run under the
                 epilogue of this one

The source is the shipped kernel's with some lines replaced, so that it follows what is shipped; a
line that is not there any more is refused. It gives the shipped kernel's bits. (Warps of their own
for the loads do not compile with the Triton 3.6 of the GPU machine.)
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
    """The shipped kernel with this loop."""
    return rewritten(tuple(REPLACED[loop]))


@functools.cache
def rewritten(replaced: tuple[tuple[str, str], ...], **names: Any) -> Any:
    """The shipped kernel with other lines, which may use these names.

    Raises:
        ValueError: a line to replace that the shipped source does not hold exactly once.
    """
    source = inspect.getsource(linear.slice_kernel.fn)
    for old, new in replaced:
        if source.count(old) != 1:
            raise ValueError(f"slice_kernel: expected {old!r} once")
        source = source.replace(old, new)
    file = f"<slice_kernel with {' '.join(new for _, new in replaced)}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    scope = {**vars(linear), **names}
    exec(compile(source, file, "exec"), scope)
    return scope["slice_kernel"]


@contextlib.contextmanager
def using_loop(loop: str) -> Iterator[None]:
    """Inside, passes that give statistics take this loop; the guard of far rows keeps its own."""
    shipped = linear.sweep

    def sweep(*args: Any, **options: Any) -> None:
        with patched(linear, slice_kernel=kernel(loop)):
            shipped(*args, **options)

    with patched(linear, sweep=sweep):
        yield
