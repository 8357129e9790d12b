"""Files of a run: regular ones only; lines of JSON that are complete or absent."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic_core import to_jsonable_python

from grpo_fast.data import reason
from grpo_fast.errors import WriteError, require


@contextmanager
def written(path: Path) -> Iterator[None]:
    """Raise a WriteError that names `path` if the disk refuses what is written inside."""
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, SafetensorError) as error:
        said = f"{path}: expected a disk with room that can be written to"
        raise WriteError(f"{said}, got {reason(error)}") from error


def check_regular(path: Path) -> None:
    """Raise a ValueError for a pipe or a device, which would block or never end."""
    fits = path.is_file() or not path.exists()
    require(fits, str(path), "a regular file", "a folder, a pipe or a device")


def read_regular(path: Path) -> bytes:
    check_regular(path)
    return path.read_bytes()


def sha256_of(path: Path) -> tuple[int, str]:
    """Return the size of a file in bytes and its sha256."""
    check_regular(path)
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return file.tell(), digest


def sync(path: Path) -> None:
    """Flush a file, or the names in a folder, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def plain_json(value: Any) -> Any:
    """Convert a value for JSON: numbers that are not finite become null, 0-d tensors numbers."""
    return to_jsonable_python(value, fallback=float, inf_nan_mode="null")


class JsonLines:
    """An open file of JSON lines: `append` writes all of its rows, or none.

    Args:
        length: bytes of the file that stay; the rest is cut off.
    """

    def __init__(self, path: Path, length: int = 0) -> None:
        check_regular(path)
        self.path, self.length = path, length
        self._file = path.open("ab", buffering=0)  # "a": a write goes to the end after a cut, too
        self._file.truncate(length)

    def append(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Add a line for each row. Raises WriteError and leaves the file as it was."""
        text = "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows).encode()
        rest = memoryview(text)
        try:
            while rest:  # a disk that is nearly full takes the beginning
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            self._file.truncate(self.length)
            said = f"{self.path}: expected room for a line, got {reason(error)}"
            raise WriteError(f"{said}; the lines before it are complete") from error
        self.length += len(text)

    def sync(self) -> None:
        if not self._file.closed:
            os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()
