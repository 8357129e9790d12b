"""Other values for names of a module, for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import ModuleType
from typing import Any


@contextlib.contextmanager
def patched(module: ModuleType, **changes: Any) -> Iterator[None]:
    """Inside, these names of the module have other values."""
    before = {name: getattr(module, name) for name in changes}
    vars(module).update(changes)
    try:
        yield
    finally:
        vars(module).update(before)
