"""Helpers for the files of a run: safe reading, and JSON Lines logs without partial rows."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic_core import to_jsonable_python

from grpo_fast.data import reason
from grpo_fast.errors import WriteError, require
from grpo_fast.train.ranks import distributed


@contextmanager
def written(path: Path) -> Iterator[None]:
    """Convert file errors inside this context to a WriteError, whose message begins with `path`."""
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, SafetensorError) as error:
        said = f"{path}: expected a disk with room that can be written to"
        raise WriteError(f"{said}, got {reason(error)}") from error


def write_on_main(path: Path, write: Callable[[], object]) -> None:
    """Call `write` on rank 0. If it fails, all ranks raise its error. All ranks must call this.

    Args:
        path: the file or folder that a WriteError names.
        write: function that writes files.

    Raises:
        WriteError: the disk is full or read-only.
    """
    with distributed.together(), written(path):
        if distributed.is_main():
            write()


def read_regular(path: Path) -> bytes:
    """Read the bytes of a regular file.

    Raises:
        ValueError: the path is a folder, a pipe or a device. Reading a pipe could block forever.
    """
    check_regular(path)
    return path.read_bytes()


def check_regular(path: Path) -> None:
    """Raise a ValueError if the path exists and is not a regular file."""
    fits = path.is_file() or not path.exists()
    require(fits, str(path), "a regular file", "a folder, a pipe or a device")


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a regular file as hexadecimal digits."""
    check_regular(path)
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync(path: Path) -> None:
    """Flush a file to disk. If the path is a folder, flush its directory entries."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def plain_json(value: Any) -> Any:
    """Convert a value to JSON types: non-finite numbers to null, and 0-d tensors to numbers."""
    return to_jsonable_python(value, fallback=float, inf_nan_mode="null")


class JsonLines:
    """Writer of a JSON Lines file. Each call to `append` writes either all of its rows or none.

    Args:
        path: the file, which is created if it does not exist.
        length: number of bytes to keep if the file exists. All later bytes are removed.
    """

    def __init__(self, path: Path, length: int = 0) -> None:
        check_regular(path)
        self.path = path
        self.length = length
        # In append mode, each write goes to the end of the file, even after a truncation. Do not
        # use a buffer, so that after an error `append` knows which bytes the file contains.
        self._file = path.open("ab", buffering=0)
        self._file.truncate(length)

    def append(self, rows: Iterable[Mapping[str, object]]) -> None:
        """Append one line for each row.

        Raises:
            WriteError: the disk is full. The file is restored to its previous length.
        """
        text = "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows).encode()
        rest = memoryview(text)
        try:
            while rest:  # on a nearly full disk, a call may write only a part
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            self._file.truncate(self.length)
            said = f"{self.path}: expected room for a line, got {reason(error)}"
            raise WriteError(f"{said}; the lines before it are complete") from error
        self.length += len(text)

    def close(self) -> None:
        self._file.close()
