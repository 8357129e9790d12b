"""Other values for names of a module or a class, for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import ModuleType
from typing import Any


@contextlib.contextmanager
def patched(owner: ModuleType | type, **changes: Any) -> Iterator[None]:
    """Inside, these names of the module or class have other values."""
    before = {name: getattr(owner, name) for name in changes}
    for name, value in changes.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)
