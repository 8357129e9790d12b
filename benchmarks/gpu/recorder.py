"""Recorder of the work that a call would queue on a GPU. It needs no CUDA build of torch.

All tensors are FakeTensors on "cuda", which have shapes and dtypes but no memory. An ATen operation
counts as one launch, unless it is a view or an allocation. A Triton kernel is recorded instead of
launched, and counts as one launch. The bytes of an operation are those that it must read and write.
Matrix products count as 0 bytes, and so do kernels whose programs may exit early.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.gpu.fake_driver import patched_launches
from benchmarks.gpu.predict import CARDS

PRODUCTS = ("mm", "addmm", "slice_kernel", "recompute_kernel")
SET_SIZE = 50  # number of ids in the support of a row
# Operations that do not launch a kernel.
FREE = ("detach", "device", "scalar_tensor", "lift_fresh", "alias", "promote_types")


class Launch(NamedTuple):
    """A recorded operation.

    Attributes:
        name: name of the ATen operation or Triton kernel.
        phase: "chunk 1", "chunk 2" and so on, or "outside" for an operation before or after all
            chunks.
        bytes: bytes that must be read and written. 0 for matrix products.
        flops: flops of a matrix product.
    """

    name: str
    phase: str
    bytes: int = 0
    flops: int = 0


class Recorder(TorchDispatchMode):
    """Dispatch mode that records every operation in its `with` block, in order.

    Attributes:
        launches: the recorded operations.
        syncs: a reason for each time that the host waits and the GPU runs out of work.
        reads: a reason for each time that the host waits for a copy and the GPU stays busy, because
            a matrix product was queued after the copy.
        phase: phase of the next operation, such as "chunk 1".
        chunks: number of chunks that have started.
    """

    def __init__(self) -> None:
        super().__init__()
        self.launches: list[Launch] = []
        self.syncs: list[str] = []
        self.reads: list[str] = []
        self.phase = "outside"
        self.chunks = 0

    def add(self, name: str, moved: int = 0, flops: int = 0) -> None:
        self.launches.append(Launch(name, self.phase, 0 if flops else moved, flops))

    @property
    def flops(self) -> int:
        return sum(x.flops for x in self.launches)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        kwargs = kwargs or {}
        name = function._schema.name.split("::")[1]
        # Do not run a product whose `out` has a different dtype, because even on fake tensors it
        # needs a CUDA build.
        out = kwargs["out"] if "dtype_out" in str(function) else function(*args, **kwargs)
        if function.is_view or "empty" in name or name in FREE:
            return out
        if name in PRODUCTS:
            a, b = [x for x in args if isinstance(x, Tensor)][-2:]
            self.add(name, flops=2 * a.shape[0] * a.shape[1] * b.shape[1])
        else:
            outputs = out if isinstance(out, tuple) else (out,)
            self.add(name, sizes_of(*args, *kwargs.values(), *outputs))
        return out

    def kernel(self, kernel: Any, programs: int, *args: Any, **options: Any) -> None:
        """Record the launch of a Triton kernel. This method replaces `gpu.launch.launch`."""
        name, given = kernel.fn.__name__, dict(zip(kernel.arg_names, args, strict=False))
        if name == "slice_kernel" and not options["ONLY_HIGH_NLL"]:
            self.add(name, flops=2 * given["n_rows"] * given["V"] * given["H"])
        else:
            moved = KERNEL_BYTES[name](given) if name in KERNEL_BYTES else sizes_of(*given.values())
            self.add(name, moved)


class Plain(TorchFunctionMode):
    """Function mode that replaces x[...], ~x and nonzero() by operations that work without CUDA.

    On a fake CUDA tensor, Python's operators use the CUDA device, which a CPU build does not have.
    """

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        if function is Tensor.__getitem__:
            return self.picked(*args)
        if function is Tensor.__setitem__ and isinstance(args[1], Tensor):
            return args[0].index_put_((args[1],), args[2])
        if function is Tensor.__setitem__:
            return torch.ops.aten.copy_(self.picked(*args[:2]), args[2])
        if function is Tensor.__invert__:
            return args[0].bitwise_not()
        if function is Tensor.nonzero:
            self.recorder.syncs.append("nonzero")
            self.recorder.add("nonzero", 2 * args[0].nbytes)
            return args[0].new_empty((args[0].numel(), 1), dtype=torch.int64)
        return function(*args, **(kwargs or {}))

    def picked(self, x: Tensor, index: Any) -> Tensor:
        dim = 0
        for i in index if isinstance(index, tuple) else (index,):
            if i is None:
                x = x.unsqueeze(dim)
            elif isinstance(i, int):
                x, dim = x.select(dim, i), dim - 1
            elif isinstance(i, slice):
                x = torch.ops.aten.slice(x, dim, i.start, i.stop)
            else:
                x = torch.ops.aten.index(x, [None] * dim + [i])
            dim += 1
        return x


def sizes_of(*values: Any) -> int:
    """Return the total size in bytes of the tensors among the values."""
    return sum(x.nbytes for x in values if isinstance(x, Tensor))


def target_rows(given: dict[str, Any]) -> int:
    """Return the number of bytes that `add_targets_kernel` moves.

    The kernel reads a row of `hidden` for each target, and reads and writes a row of dW.
    """
    rows, width = given["id_ptr"].shape[0], given["H"]
    once = given["hidden_ptr"].element_size() + 2 * given["out_ptr"].element_size()
    return rows * width * once


def indexed_rows(given: dict[str, Any]) -> int:
    """Return the bytes moved by a kernel that reads a matrix row for each id and writes once."""
    if "id_ptr" in given:
        names = "id_ptr", "weight_ptr", "slope_ptr"
    else:
        names = "index_ptr", "matrix_ptr", "out_ptr"
    ids, matrix, written = (given.get(name) for name in names)
    row_bytes = given["H"] * matrix.element_size()
    return len(ids) * (ids.element_size() + 4 + row_bytes) + sizes_of(written)


UNCOUNTED = ("slice_kernel", "recompute_kernel", "scale_kernel")
KERNEL_BYTES: dict[str, Callable[[dict[str, Any]], int]] = {
    **dict.fromkeys(UNCOUNTED, lambda given: 0),
    "target_kernel": lambda given: 2 * given["hidden_ptr"].nbytes,
    "write_hidden_kernel": lambda given: (
        given["target_ptr"].shape[0] * given["H"] * (4 + 2 + given["out_ptr"].element_size())
        + sizes_of(given["hidden_ptr"], given["scaled_ptr"])
    ),
    "add_targets_kernel": target_rows,
    "support_head_kernel": indexed_rows,
    "sums_kernel": indexed_rows,
}


@contextlib.contextmanager
def recording() -> Iterator[Recorder]:
    """Record the operations of a `with` block, in which all tensors are fake GPU tensors."""
    from grpo_fast.kernels import workspace
    from grpo_fast.kernels.gpu import linear, support
    from grpo_fast.kernels.head import driver, sources
    from grpo_fast.loss import call, checks

    recorder = Recorder()

    def copied(numbers: Tensor) -> tuple[Tensor, None]:
        """Record a copy to the host. The function that this replaces needs pinned memory."""
        recorder.add("copy of numbers to the host", numbers.nbytes)
        return numbers, None

    def keep(self: driver.Activity, chunk: slice) -> None:
        if self.active is not None:
            self._counts()

    def later(x: Tensor) -> Callable[[], list[int]]:
        recorder.add("copy of counts to the host", x.nbytes)
        queued = recorder.flops
        waits = [recorder.reads, recorder.syncs]

        def read() -> list[int]:
            while waits:  # only the first read waits
                waits[queued == recorder.flops].append("active rows")
                waits.clear()
            return []

        return read

    def sizes(has_set: Tensor, lengths: Tensor) -> tuple[int, int]:
        """Record a wait of the host, and assume that the support of every row has SET_SIZE ids.

        This replaces `call._sizes`, which reads the number of rows with a support and the
        number of ids in all supports. Fake tensors have no values to read.
        """
        recorder.syncs.append("sizes of the support")
        return len(lengths), len(lengths) * SET_SIZE

    def chunk(self: sources.DenseHead, index: Any, *, stores: bool = True) -> Any:
        if stores:
            recorder.chunks += 1
            recorder.phase = f"chunk {recorder.chunks}"
        return original(self, index, stores=stores)

    def release(self: sources.DenseHead) -> None:
        recorder.phase = "outside"
        released(self)

    def logps(self: driver.Driver, **options: Any) -> tuple:
        found = passed(self, **options)
        recorder.phase = "outside"
        return found

    original, released = sources.DenseHead.chunk, sources.DenseHead.release
    passed = driver.Driver.logps
    with contextlib.ExitStack() as stack:
        stack.enter_context(patched_launches(recorder.kernel))
        for place, changes in (
            (linear, {"is_aligned": lambda x: True, "tiles": lambda p, x, *shape: x}),
            (linear, {"architecture": lambda device: "sm_90"}),
            (driver, {"read_later": later}),
            (driver.Activity, {"keep": keep}),
            (checks, {"copy_to_host_async": copied, "_pending": []}),
            (call, {"_sizes": sizes}),
            (support, {"is_aligned": lambda x: True}),
            (sources.DenseHead, {"chunk": chunk, "release": release}),
            (driver.Driver, {"logps": logps}),
            (torch.cuda, {"is_current_stream_capturing": lambda: False}),
            (torch.cuda, {"current_device": lambda: 0}),
            (torch.cuda, {"device_of": lambda x: contextlib.nullcontext()}),
            (workspace, {"gpu_bytes": lambda device: CARDS["H200"]}),
        ):
            stack.enter_context(mock.patch.multiple(place, **changes))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(recorder)
        stack.enter_context(Plain(recorder))
        yield recorder
