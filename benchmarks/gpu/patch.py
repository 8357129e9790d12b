"""Temporary replacement of attributes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
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
