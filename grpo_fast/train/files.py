"""What a run writes as JSON: plain values; a file of lines, of which each is whole or not there."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from grpo_fast.data import reason
from grpo_fast.errors import WriteError


@contextmanager
def written(path: Path) -> Iterator[None]:
    """What the disk refuses becomes a WriteError that names the file."""
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, SafetensorError) as error:
        said = f"{path}: expected a disk with room that can be written to"
        raise WriteError(f"{said}, got {reason(error)}") from error


def plain_json(value: Any) -> Any:
    """What JSON has a word for; numbers that are not finite are null."""
    if isinstance(value, Mapping):
        return {str(key): plain_json(item) for key, item in value.items()}
    if isinstance(value, list):
        return [plain_json(item) for item in value]
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, Path):
        return str(value)
    return float(value) if math.isfinite(value) else None


class JsonLines:
    """An open file of lines. What other programs read of it is never half a call's.

    Args:
        path: of the file, made where there is none.
        length: bytes of it that stay; what stands behind them is cut off.

    Raises:
        ValueError: a file that is shorter than `length`.
    """

    def __init__(self, path: Path, length: int = 0) -> None:
        self.path = path
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        self._is_open = True
        found = os.fstat(self._file).st_size
        if found < length:
            self.close()
            expected = f"at least {length} bytes in {path}, which its checkpoint has seen"
            raise ValueError(f"resume: expected {expected}, got {found}")
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
        """Every line is on the disk."""
        os.fsync(self._file)

    def close(self) -> None:
        """Again: nothing."""
        if self._is_open:
            os.close(self._file)
            self._is_open = False
