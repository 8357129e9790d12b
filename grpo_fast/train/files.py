"""Files of a run: regular files, and logs of JSON lines that are complete or absent."""

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


def read_regular(path: Path) -> bytes:
    """Return the bytes of a file. Raises ValueError for a pipe or a device, which would block."""
    check_regular(path)
    return path.read_bytes()


def check_regular(path: Path) -> None:
    """Raise a ValueError for anything that exists and is not a regular file."""
    fits = path.is_file() or not path.exists()
    require(fits, str(path), "a regular file", "a folder, a pipe or a device")


def sha256_of(path: Path) -> str:
    """Return the sha256 of a regular file."""
    check_regular(path)
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


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
    """An open file of JSON lines. `append` writes all of its rows, or none.

    Args:
        path: The file, which is created if it is missing.
        length: Number of bytes of the file that stay. The rest is removed.
    """

    def __init__(self, path: Path, length: int = 0) -> None:
        check_regular(path)
        self.path = path
        self.length = length
        # Append mode without a buffer: every write goes to the end, also after a truncation.
        self._file = path.open("ab", buffering=0)
        self._file.truncate(length)

    def append(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Add a line for each row. Raises WriteError and leaves the file as it was."""
        text = "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows).encode()
        rest = memoryview(text)
        try:
            while rest:  # a disk that is nearly full takes the beginning only
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            self._file.truncate(self.length)
            said = f"{self.path}: expected room for a line, got {reason(error)}"
            raise WriteError(f"{said}; the lines before it are complete") from error
        self.length += len(text)

    def sync(self) -> None:
        """Flush the file to the disk, unless it is closed."""
        if not self._file.closed:
            os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()
