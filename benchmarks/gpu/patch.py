"""Temporary replacement of attributes."""

from __future__ import annotations

import contextlib
import importlib
import pkgutil
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any


@contextlib.contextmanager
def patched(owner: ModuleType | type, **changes: Any) -> Iterator[None]:
    """Replace attributes of a module or class inside the context, and restore them afterwards."""
    before = {name: getattr(owner, name) for name in changes}
    for name, value in changes.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


@contextlib.contextmanager
def patched_launches(launch: Callable[..., None]) -> Iterator[None]:
    """Replace the function that starts Triton kernels, in every loaded module that uses it."""
    from grpo_fast.kernels import gpu
    from grpo_fast.kernels.gpu import launch as original

    # Import all kernels first. A module imported inside the context would start its kernels.
    for found in pkgutil.iter_modules(gpu.__path__, f"{gpu.__name__}."):
        importlib.import_module(found.name)
    users = [
        module
        for module in list(sys.modules.values())
        if isinstance(module, ModuleType) and vars(module).get("launch") is original.launch
    ]
    with contextlib.ExitStack() as stack:
        for module in users:
            stack.enter_context(patched(module, launch=launch))
        yield
