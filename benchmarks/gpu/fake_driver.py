"""Triton driver that only names a GPU architecture, so that kernels compile without a GPU.

`kernel.warmup(...)` compiles a kernel for the architecture of the active driver and for the given
arguments, which may be CPU tensors. The fake driver stays active, so use it in a separate process.
"""

from __future__ import annotations

import contextlib
import importlib
import pkgutil
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from triton.backends.compiler import GPUTarget

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
