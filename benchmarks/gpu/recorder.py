"""Recorder of the work that a call would queue on a GPU. It needs no CUDA build of torch.

All tensors are FakeTensors on "cuda", which have shapes and dtypes but no memory. An ATen operation
counts as one launch, unless it is a view or an allocation. A Triton kernel is recorded instead of
launched, and counts as one launch. The bytes of an operation are those that it must read and write.
Matrix products count as 0 bytes, and so do kernels whose programs may return at once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.gpu.patch import patched, patched_launches
from benchmarks.gpu.predict import CARDS

PRODUCTS = ("mm", "addmm", "slice_kernel", "column_product_kernel")
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
        syncs: waits of the host during which the GPU becomes idle, because no later work is queued.
            An entry is the reason for the wait.
        reads: waits of the host during which the GPU stays busy, because a matrix product was
            queued after the copy for which the host waits. An entry is the reason for the wait.
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

    def next_chunk(self) -> None:
        self.chunks += 1
        self.phase = f"chunk {self.chunks}"

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        kwargs = kwargs or {}
        name = function._schema.name.split("::")[1]
        # Do not run a product whose `out` has a different dtype. It needs a CUDA build even with
        # fake tensors.
        out = kwargs["out"] if "dtype_out" in str(function) else function(*args, **kwargs)
        if function.is_view or "empty" in name or name in FREE:
            return out
        if name in PRODUCTS:
            a, b = [x for x in args if isinstance(x, Tensor)][-2:]
            self.add(name, flops=2 * a.shape[0] * a.shape[1] * b.shape[1])
        else:
            tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
            outputs = [x for x in (out if isinstance(out, tuple) else (out,))]
            tensors += [x for x in outputs if isinstance(x, Tensor)]
            self.add(name, sum(size(x) for x in tensors))
        return out

    def kernel(self, kernel: Any, programs: int, *args: Any, **options: Any) -> None:
        """Record the launch of a Triton kernel, in place of `gpu.launch.launch`, which would launch
        it.
        """
        name, given = kernel.fn.__name__, dict(zip(kernel.arg_names, args, strict=False))
        if name == "slice_kernel" and not options["ONLY_HIGH_NLL"]:
            self.add(name, flops=2 * given["n_rows"] * given["V"] * given["H"])
        else:
            self.add(name, KERNEL_BYTES.get(name, all_of)(given))


class Plain(TorchFunctionMode):
    """Function mode that replaces x[...], ~x and nonzero() by operations that work without CUDA.

    Python's operators on a fake CUDA tensor ask for the CUDA device, which a CPU build does not
    have.
    """

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        if function is Tensor.__getitem__:
            return self.picked(*args)
        if function is Tensor.__setitem__:
            x, index, value = args
            if isinstance(index, Tensor):
                return x.index_put_((index,), value)
            return self.picked(x, index).copy_(value)
        if function is Tensor.__invert__:
            return args[0].bitwise_not()
        if function is Tensor.nonzero:
            self.recorder.syncs.append("nonzero")
            self.recorder.add("nonzero", 2 * size(args[0]))
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


def size(x: Tensor) -> int:
    return x.numel() * x.element_size()


def all_of(given: dict[str, Any]) -> int:
    return sum(size(x) for x in given.values() if isinstance(x, Tensor))


def target_rows(given: dict[str, Any]) -> int:
    """Return the bytes of `add_targets_kernel`.

    The kernel reads a row of `hidden` for each target, and reads and writes a row of dW. If
    `product_ptr` is given, it processes only a few rows, which count as 0 bytes.
    """
    rows, width = given["id_ptr"].shape[0], given["H"]
    once = given["hidden_ptr"].element_size() + 2 * given["out_ptr"].element_size()
    return 0 if given["product_ptr"] is not None else rows * width * once


def indexed_rows(given: dict[str, Any]) -> int:
    """Return the bytes of a kernel that reads one matrix row for each id and writes its output."""
    head = "id_ptr" in given
    names, matrix = (("id_ptr", "weight_ptr"), ("index_ptr", "matrix_ptr"))[not head]
    row_bytes = given["H"] * given[matrix].element_size()
    written = given.get("slope_ptr" if head else "out_ptr")
    moved = given[names].shape[0] * (given[names].element_size() + 4 + row_bytes)
    return moved + (size(written) if isinstance(written, Tensor) else 0)


KERNEL_BYTES: dict[str, Callable[[dict[str, Any]], int]] = {
    "slice_kernel": lambda given: 0,
    "target_kernel": lambda given: 2 * size(given["hidden_ptr"]),
    "write_hidden_kernel": lambda given: (
        given["target_ptr"].shape[0] * given["H"] * (4 + 2 + given["out_ptr"].element_size())
    ),
    "add_targets_kernel": target_rows,
    "gather_columns_kernel": lambda given: 0,
    "column_product_kernel": lambda given: 0,
    "scale_kernel": lambda given: 0,
    "support_head_kernel": indexed_rows,
    "sums_kernel": indexed_rows,
}


@contextlib.contextmanager
def recording() -> Iterator[Recorder]:
    """Record the work that a GPU would get in a `with` block. All tensors in the block are fake."""
    from grpo_fast.kernels import workspace
    from grpo_fast.kernels.gpu import linear, support
    from grpo_fast.kernels.head import activity, loop
    from grpo_fast.loss import support_rows, value_checks

    recorder = Recorder()

    def copied(numbers: Tensor) -> tuple[Tensor, None]:
        """Record an asynchronous copy to the host. The real function needs pinned memory."""
        recorder.add("copy of numbers to the host", size(numbers))
        return numbers, None

    def keep(self: activity.Activity, chunk: slice) -> None:
        if self.active is not None:
            self._counts()

    def later(x: Tensor) -> Callable[[], list[int]]:
        recorder.add("copy of counts to the host", size(x))
        queued = recorder.flops
        waits = [recorder.reads, recorder.syncs]

        def read() -> list[int]:
            while waits:  # only the first read waits
                waits[queued == recorder.flops].append("active rows")
                waits.clear()
            return []

        return read

    def sizes(has_set: Tensor, lengths: Tensor) -> tuple[int, int]:
        """Record that the host waits for two sizes, and return assumed sizes.

        This replaces `support_rows._sizes`, which reads the number of rows with a support and the
        number of ids in all supports. Fake tensors have no values, so assume that every row has
        SET_SIZE ids.
        """
        recorder.syncs.append("sizes of the support")
        return len(lengths), len(lengths) * SET_SIZE

    def rows_of(self: loop.LinearHead, chunk: slice) -> Any:
        recorder.next_chunk()
        return original(self, chunk)

    def finished(self: loop.LinearHead, sums: Any) -> tuple:
        recorder.phase = "outside"
        return ended(self, sums)

    def logps(self: loop.LinearHead, **options: Any) -> tuple:
        found = swept(self, **options)
        recorder.phase = "outside"
        return found

    original, ended = loop.LinearHead._rows_of, loop.LinearHead._finished
    swept = loop.LinearHead.logps
    with contextlib.ExitStack() as stack:
        stack.enter_context(patched_launches(recorder.kernel))
        for place, changes in (
            (linear, {"is_aligned": lambda x: True, "tiles": lambda x, *shape: x}),
            (linear, {"architecture": lambda device: "sm_90"}),
            (activity, {"read_later": later}),
            (activity.Activity, {"keep": keep}),
            (value_checks, {"copy_to_host_async": copied, "_pending": []}),
            (support_rows, {"_sizes": sizes}),
            (support, {"is_aligned": lambda x: True}),
            (loop.LinearHead, {"_rows_of": rows_of, "_finished": finished, "logps": logps}),
            (torch.cuda, {"is_current_stream_capturing": lambda: False}),
            (torch.cuda, {"device_of": lambda x: contextlib.nullcontext()}),
            (workspace, {"gpu_bytes": lambda device: CARDS["H200"].memory}),
        ):
            stack.enter_context(patched(place, **changes))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(recorder)
        stack.enter_context(Plain(recorder))
        yield recorder
