"""Temporary replacement of the function that launches Triton kernels."""

from __future__ import annotations

import contextlib
import importlib
import pkgutil
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from unittest import mock


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
