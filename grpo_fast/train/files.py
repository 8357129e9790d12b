"""Files of a run: regular ones only, read up to a bound; lines of JSON that are whole or absent."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic_core import to_jsonable_python

from grpo_fast.data import reason
from grpo_fast.errors import WriteError, require


@contextmanager
def written(path: Path) -> Iterator[None]:
    """Raise a WriteError that names `path` where a disk refuses what is written inside."""
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, SafetensorError) as error:
        said = f"{path}: expected a disk with room that can be written to"
        raise WriteError(f"{said}, got {reason(error)}") from error


def check_regular(path: Path) -> None:
    """Raise a ValueError for a link, a pipe or a device; a folder or nothing at all will do."""
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    fits = stat.S_ISREG(mode) or stat.S_ISDIR(mode)
    require(fits, str(path), "a regular file or a folder", _kind(mode))


def open_regular(path: Path, flags: int = os.O_RDONLY) -> int:
    """Open a regular file. Raises ValueError for a link, a pipe or a device, before it is read."""
    try:
        # Without O_NONBLOCK the opening of a pipe waits for its other end.
        handle = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise ValueError(f"{path}: expected a regular file, got a link") from error
        raise
    mode = os.fstat(handle).st_mode
    if not stat.S_ISREG(mode):
        os.close(handle)
        raise ValueError(f"{path}: expected a regular file, got {_kind(mode)}")
    return handle


def _kind(mode: int) -> str:
    kinds = {"a link": stat.S_ISLNK, "a pipe": stat.S_ISFIFO, "a socket": stat.S_ISSOCK,
             "a folder": stat.S_ISDIR}  # fmt: skip
    return next((name for name, is_one in kinds.items() if is_one(mode)), "a device")


def read_regular(path: Path, most: int) -> bytes:
    """The content of a regular file of at most so many bytes. Raises ValueError for another."""
    with os.fdopen(open_regular(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        require(size <= most, str(path), f"at most {most} bytes", size)
        return file.read(size)


def sha256_of(path: Path) -> tuple[int, str]:
    with os.fdopen(open_regular(path), "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return file.tell(), digest


def sync(path: Path) -> None:
    """Flush a file, or the names that a folder holds, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def plain_json(value: Any) -> Any:
    """Convert a value for JSON; numbers that are not finite become null, 0-d tensors numbers."""
    return to_jsonable_python(value, fallback=float, inf_nan_mode="null")


class JsonLines:
    """An open file of JSON lines: the rows of one `append` are there whole, or not at all.

    length: bytes of the file that stay; the rest is cut off.
    """

    def __init__(self, path: Path, length: int = 0) -> None:
        self.path = path
        # O_APPEND: after a cut the next write goes to the new end, not to the old offset.
        self._file = open_regular(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        self._is_open = True
        os.ftruncate(self._file, length)
        self.length = length

    def append(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Add a line for each row. Raises WriteError, with the file as it was."""
        text = "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows).encode()
        written = 0
        try:
            while written < len(text):
                written += os.write(self._file, text[written:])
        except OSError as error:
            os.ftruncate(self._file, self.length)
            said = f"{self.path}: expected room for a line, got {reason(error)}"
            raise WriteError(f"{said}; the lines before it are whole") from error
        self.length += written

    def sync(self) -> None:
        os.fsync(self._file)

    def close(self) -> None:
        if self._is_open:
            os.close(self._file)
            self._is_open = False
