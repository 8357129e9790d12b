"""CPU time that the host spends on one call on a GPU, measured without a GPU.

    python -m benchmarks.gpu.host    prints a table in Markdown

All tensors are CPU tensors that claim to be on a GPU. The Triton kernels are compiled for sm_90 and
launched by Triton's own code, but the last step, which enters the CUDA driver, does nothing.
Matrix products do nothing either. All other operations of torch run on the CPU, where an operation
on a few thousand elements takes about as long as a launch on a GPU. The backward pass runs in the
calling thread. On a GPU, autograd runs it in a thread of the device.

`TargetOnlyDriver` is a Triton driver that only names a GPU architecture. With this driver,
`kernel.warmup(...)` compiles a kernel for the architecture and for the given arguments, which may
be CPU tensors. The driver stays active, so use it in a separate process.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import pkgutil
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from triton.backends.compiler import GPUTarget

from benchmarks.gpu.report import table
from benchmarks.options import new_parser
from grpo_fast import LossConfig, linear_grpo_loss, linear_logps

# ---- a driver without a GPU ----
TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "sm_120": GPUTarget("cuda", 120, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}


class TargetOnlyDriver:
    """Driver that tells the compiler its target, but cannot launch a kernel."""

    launcher_cls: Any = None
    utils: Any = None

    def __init__(self, target: GPUTarget) -> None:
        self.target = target

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        # Return a different number for each architecture. A kernel caches one compiler backend per
        # device number. With equal numbers, every architecture would get the code of the first one.
        return list(TARGETS.values()).index(self.target)

    def set_current_device(self, device: int) -> None:
        pass

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def map_python_to_cpp_type(self, name: str) -> str:
        return name


@contextlib.contextmanager
def patched_launches(launch: Callable[..., None]) -> Iterator[None]:
    """Replace the function that launches Triton kernels in all modules that use it."""
    from grpo_fast.kernels import gpu
    from grpo_fast.kernels.gpu import launch as original

    # Import all kernel modules before patching, because a module that is imported later would use
    # the unpatched function.
    for found in pkgutil.iter_modules(gpu.__path__, f"{gpu.__name__}."):
        importlib.import_module(found.name)
    users = [
        module
        for module in list(sys.modules.values())
        if isinstance(module, ModuleType) and vars(module).get("launch") is original.launch
    ]
    with contextlib.ExitStack() as stack:
        for module in users:
            stack.enter_context(mock.patch.object(module, "launch", launch))
        yield


# ---- the measured calls ----
ROWS = 1024
HIDDEN = 896
# As with V = 151936, dW is written in 16 bits and the rows are one chunk.
VOCAB = 20032
BATCHES = 15
CALLS = 25
# Let malloc keep freed pages, as the allocator of a GPU does.
KEPT_PAGES = dict.fromkeys(("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"), str(1 << 40))


class Driver(TargetOnlyDriver):
    """Driver whose functions for loading and launching kernels do nothing."""

    utils = SimpleNamespace(
        load_binary=lambda *args: (1, 1, 32, 0, 1024),
        get_device_properties=lambda device: {"max_shared_mem": 232448},
    )

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., None]:
        return lambda *args: None


class Event:
    """Replacement for `torch.cuda.Event`. It is always complete, as after a copy without delay."""

    def record(self, stream: Any = None) -> None:
        pass

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


def product(
    a: Tensor, b: Tensor, *, out_dtype: torch.dtype | None = None, out: Tensor | None = None
) -> Tensor:
    """Return an uninitialised matrix in place of a product."""
    shape = a.shape[0], b.shape[1]
    return a.new_empty(shape, dtype=out_dtype or a.dtype) if out is None else out


def judged(late: Any) -> list[str]:
    """Call the checks on uninitialised numbers, and return no messages.

    The kernel that would write the numbers does nothing, so they are not initialised.
    """
    for judge, numbers in zip(late.judges, late.numbers.tolist(), strict=True):
        judge(*numbers)
    return []


@contextlib.contextmanager
def claimed_gpu() -> Iterator[None]:
    """Make all CPU tensors claim to be on a GPU inside the context."""
    from triton.runtime import driver

    from grpo_fast.kernels import route, workspace
    from grpo_fast.loss import checks

    driver.set_active(Driver(TARGETS["sm_90"]))
    empty = torch.empty
    zeros = torch.zeros

    def allocated(*shape: Any, pin_memory: bool = False, **options: Any) -> Tensor:
        # Zeros are valid indices. The kernel that would write the indices does nothing.
        make = zeros if options.get("dtype") is torch.int64 else empty
        return make(*shape, **options)

    with contextlib.ExitStack() as stack:
        for place, changes in (
            (Tensor, {"is_cuda": True, "is_cpu": False, "get_device": lambda x: 0}),
            (torch, {"mm": product, "empty": allocated}),
            (torch.cuda, {"Event": Event, "current_stream": lambda device=None: None}),
            (torch.cuda, {"_exchange_device": lambda i: 0, "is_available": lambda: True}),
            (torch.cuda, {"_maybe_exchange_device": lambda i: 0, "current_device": lambda: 0}),
            (torch.cuda, {"is_current_stream_capturing": lambda: False}),
            (workspace, {"gpu_bytes": lambda device: 141 << 30}),
            (route, {"unavailable": lambda *args: None}),
            (checks.LateChecks, {"messages": judged}),
        ):
            stack.enter_context(mock.patch.multiple(place, **changes))
        yield


def cases() -> dict[str, Callable[[], object]]:
    """Return the calls to be measured."""
    torch.manual_seed(0)
    hidden = (torch.randn(ROWS, HIDDEN) / HIDDEN).bfloat16().requires_grad_()
    weight = torch.randn(VOCAB, HIDDEN).bfloat16().requires_grad_()
    ids = torch.randint(64, (ROWS,))
    advantages = torch.randn(8)
    old = -torch.rand(ROWS)
    options: dict[str, Any] = dict(
        cu_seqlens=torch.arange(0, ROWS + 1, ROWS // 8, dtype=torch.int32), old_logps=old,
        num_items_in_batch=float(ROWS), backend="triton",
    )  # fmt: skip

    def loss(loss_type: str) -> None:
        out = linear_grpo_loss(hidden, weight, ids, advantages, CONFIGS[loss_type], **options)
        out.loss.backward()
        hidden.grad = weight.grad = None

    def logps() -> None:
        with torch.no_grad():
            linear_logps(hidden, weight, ids, backend="triton")

    return {
        "linear_grpo_loss, dapo": partial(loss, "dapo"),
        "linear_grpo_loss, gspo": partial(loss, "gspo"),
        "linear_logps, no gradient": logps,
    }


CONFIGS = {name: LossConfig(loss_type=name) for name in ("dapo", "gspo")}


def microseconds(call: Callable[[], object]) -> float:
    """Return the least CPU time of a call over all batches, in microseconds."""
    call()
    call()
    times = []
    for _ in range(BATCHES):
        start = time.thread_time()
        for _ in range(CALLS):
            call()
        times.append((time.thread_time() - start) / CALLS * 1e6)
    return min(times)


def main(arguments: list[str]) -> int:
    new_parser(__doc__).parse_args(arguments)
    if not KEPT_PAGES.items() <= os.environ.items():
        command = [sys.executable, "-m", "benchmarks.gpu.host", *arguments]
        os.execve(sys.executable, command, {**os.environ, **KEPT_PAGES})
    torch.set_num_threads(1)
    with claimed_gpu():
        rows = [(name, f"{microseconds(call):.0f}") for name, call in cases().items()]
    print(*table("CPU time of one call", "case | us", rows), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
