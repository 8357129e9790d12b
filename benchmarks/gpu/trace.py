"""Launches, waits, bytes and products of a call on a GPU, counted without a GPU.

    python -m benchmarks.gpu.trace                  prints a table in Markdown
    python -m benchmarks.gpu.trace --json           prints the same numbers as JSON

The traced call does not use autograd, which needs a CUDA build. It includes the work of the
backward pass, which scales the gradients. Some of the work depends on values, which are unknown
here. The trace assumes that every row is active, that no sum in dW cancels almost to zero, and that
the upstream gradient is 1. The GPU has the memory of an H200.
tests/benchmarks/test_measurements.py has the budgets of the calls.

All tensors are FakeTensors on "cuda", which have shapes and dtypes but no memory. An ATen operation
counts as one launch, unless it is a view or an allocation. A Triton kernel is recorded instead of
launched, and counts as one launch. The bytes of an operation are those that it must read and write.
Matrix products count as 0 bytes, and so do kernels whose programs may exit early.
"""

from __future__ import annotations

import collections
import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.gpu.host import patched_launches
from benchmarks.gpu.report import CARDS, table
from benchmarks.options import new_parser
from grpo_fast import LossConfig, Support
from grpo_fast.kernels.types import Wanted
from grpo_fast.loss import autograd
from grpo_fast.loss.call import Call

# ---- the recorder ----
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


# ---- the traced calls ----
def new(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(*shape, device="cuda", dtype=dtype)


class Context(SimpleNamespace):
    """Replacement for the context that autograd passes to a function."""

    def save_for_backward(self, *tensors: Tensor) -> None:
        self.saved_tensors = tensors

    def set_materialize_grads(self, on: bool) -> None:
        pass


class Case(NamedTuple):
    """A call in bf16 on eight packed completions.

    Attributes:
        rows: number of tokens.
        hidden: hidden size.
        vocab: vocabulary size.
        wants: whether dH and dW are computed.
        loss_type: `loss_type` of the LossConfig.
        beta: weight of the KL term.
        mask: True passes padded completions with a mask instead of packed completions.
        calls: number of calls with the same LM head.
        support: True passes a support of SET_SIZE ids for each row.
        logits: the logits are given.
        logps: the call computes logps, with the gradients in `wants`, instead of a loss.
    """

    rows: int
    hidden: int
    vocab: int = 151936
    wants: tuple[bool, bool] = (True, True)
    loss_type: str = "dapo"
    beta: float = 0.0
    mask: bool = False
    calls: int = 1
    support: bool = False
    logits: bool = False
    logps: bool = False

    def run(self) -> Recorder:
        with recording() as recorder:
            weight = new(self.vocab, self.hidden)
            for _ in range(self.calls):
                hidden = new(self.rows, self.hidden)
                self._call((new(self.rows, self.vocab),) if self.logits else (hidden, weight, None))
        return recorder

    def _call(self, tensors: tuple[Tensor | None, ...]) -> None:
        wanted = Wanted(self.wants[0], self.wants[1] and not self.logits, False)
        if self.logps:
            like = new(self.rows, dtype=torch.int64)
            call = Call(tensors=tensors, like=like, backend="triton")
            call.wanted = wanted
            self._logps(call.find_targets())
            return
        shape = (8, self.rows // 8) if self.mask else (self.rows,)
        support = None
        if self.support:
            ids = new(self.rows * SET_SIZE, dtype=torch.int32)
            support = Support(ids, new(self.rows + 1, dtype=torch.int64))
        call = Call(
            tensors=tensors, like=new(*shape, dtype=torch.int64), backend="triton",
            config=LossConfig(loss_type=self.loss_type, beta=self.beta),
            advantages=new(8, dtype=torch.float32), support=support,
            completion_mask=new(*shape, dtype=torch.bool) if self.mask else None,
            cu_seqlens=None if self.mask else new(9, dtype=torch.int32),
            old_logps=new(*shape, dtype=torch.float32),
            ref_logps=new(*shape, dtype=torch.float32) if self.beta else None,
            num_items_in_batch=self.rows,
        )  # fmt: skip
        call.wanted = wanted
        result = autograd.loss_from_logits(call.find_tokens(), tensors)
        needed = [x for x in result.gradients if x.numel()]
        autograd.scale_(needed, [result.loss] * len(needed))

    def _logps(self, call: Call) -> None:
        """Compute logps and their gradients, as autograd would."""
        needs = call.wanted[: len(call.tensors)]
        context = Context(needs_input_grad=(False, *needs))
        logps, *_ = autograd.LogpsFunction.forward(context, call, *call.tensors)
        if any(call.wanted):
            with torch.no_grad():
                autograd.LogpsFunction.backward(context, torch.empty_like(logps), None)


class Budget(NamedTuple):
    """Counts of a trace.

    Attributes:
        chunks: number of chunks of all calls.
        per_chunk: number of launches in the largest chunk.
        outside: number of launches of one call outside of its chunks.
        syncs: number of times that the host waits in one call while the GPU has no other work.
        reads: number of times that the host waits in one call while the GPU has other work.
        gigabytes: memory traffic in GB of all operations except matrix products.
        products: flops of the matrix products, as a multiple of N·V·H.
    """

    chunks: int
    per_chunk: int
    outside: int
    syncs: int
    reads: int
    gigabytes: float
    products: float

    @classmethod
    def of(cls, recorder: Recorder, case: Case) -> Budget:
        phases = collections.Counter(x.phase for x in recorder.launches)
        totals = phases.pop("outside", 0), len(recorder.syncs), len(recorder.reads)
        outside, syncs, reads = (-(-total // case.calls) for total in totals)
        per_chunk = max(phases.values(), default=0)
        moved = sum(x.bytes for x in recorder.launches)
        work = case.calls * case.rows * case.hidden * case.vocab
        products = recorder.flops / work
        return cls(recorder.chunks, per_chunk, outside, syncs, reads, moved / 1e9, products)


CASES: dict[str, Case] = {
    "full, H = 4096": Case(8192, 4096),
    "full, H = 2048": Case(8192, 2048),
    "full, H = 896": Case(8192, 896),
    "1024 rows, H = 896": Case(1024, 896),
    "with KL": Case(8192, 4096, beta=0.1),
    "with a mask": Case(8192, 4096, mask=True),
    "frozen head (LoRA)": Case(8192, 4096, wants=(True, False)),
    "head alone": Case(8192, 4096, wants=(False, True)),
    "no gradient": Case(8192, 4096, wants=(False, False)),
    "linear_logps": Case(8192, 4096, wants=(False, False), logps=True),
    "linear_logps, gradient": Case(8192, 4096, logps=True),
    "linear_logps, gradient, 1024 rows": Case(1024, 896, logps=True),
    "logits_logps": Case(8192, 1, wants=(False, False), logits=True, logps=True),
    "logits_logps, gradient": Case(8192, 1, logits=True, logps=True),
    "logits_grpo_loss": Case(8192, 1, logits=True),
    "logits_grpo_loss, sequence level": Case(8192, 1, logits=True, loss_type="gspo"),
    "logits_grpo_loss, mask": Case(8192, 1, logits=True, mask=True),
    "with a mask, 1024 rows": Case(1024, 896, mask=True),
    "several chunks": Case(65536, 2048),
    "several chunks, sequence level": Case(65536, 2048, loss_type="gspo"),
    "three heads of one weight": Case(2048, 4096, calls=3),
    "support, 50 ids": Case(8192, 4096, support=True),
    "support, frozen head": Case(8192, 4096, support=True, wants=(True, False)),
    "sequence level": Case(8192, 4096, loss_type="gspo"),
    "sequence level, 1024 rows, H = 896": Case(1024, 896, loss_type="gspo"),
}


def main(arguments: list[str]) -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args(arguments)
    found = {name: Budget.of(case.run(), case) for name, case in CASES.items()}
    if options.json:
        print(json.dumps({name: budget._asdict() for name, budget in found.items()}))
        return
    rows = ((name, *(f"{value:.4g}" for value in budget)) for name, budget in found.items())
    columns = " | ".join(("case", *Budget._fields))
    print(*table("Work of one call on a GPU", columns, rows), sep="\n")


if __name__ == "__main__":
    main(sys.argv[1:])
