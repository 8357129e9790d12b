"""The folder of a run: its name, whether it is free, and its lock."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from grpo_fast.errors import require

LOCK = ".lock"
IGNORED = {LOCK, "config.yaml.tmp"}  # files of a run that ended at its start


def run_folder(root: str | Path, name: str) -> Path:
    """Return the folder `name` in `root`. Raises ValueError for a name that leaves `root`."""
    place = Path(root) / name
    is_plain = name.isprintable() and not {*"/\\:"} & {*name}
    fits = is_plain and name.strip() and place.resolve().parent == Path(root).resolve()
    require(fits, "name", f"a plain folder name inside {root}", repr(name))
    return place


def free_folder(folder: str | Path) -> Path:
    """Return the first of `folder`, `folder`-2, `folder`-3 … that holds no run."""
    base = Path(folder)
    numbered = (base.with_name(f"{base.name}-{number}") for number in itertools.count(2))
    return next(path for path in itertools.chain([base], numbered) if not is_occupied(path))


def is_occupied(folder: str | Path) -> bool:
    """Return whether the folder holds files. Raises ValueError if it cannot be read."""
    try:
        return os.path.isdir(folder) and bool({*os.listdir(folder)} - IGNORED)
    except (OSError, ValueError) as error:
        raise _unusable(folder, error) from error


def check_folder(folder: str | Path) -> None:
    """Raise a ValueError for an existing folder that is occupied or not writable."""
    if is_occupied(folder):
        listed = ", ".join(sorted({*os.listdir(folder)} - IGNORED)[:3])
        raise ValueError(
            f"output_dir: {folder} is occupied (it holds {listed}); choose an empty or new folder "
            "with output_dir=… or --name …"
        )
    if not os.access(folder, os.W_OK | os.X_OK):
        raise _unusable(folder, "it is not writable")


@contextmanager
def locked(folder: str | Path) -> Iterator[Path]:
    """Create the folder if it is missing, and keep all other processes out of it.

    Raises:
        ValueError: Another process has the folder, or it cannot be created.
    """
    path = Path(folder)
    is_new = not os.path.lexists(path)
    lock = FileLock(path / LOCK, timeout=0)
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout as error:
        raise _unusable(folder, "another process is writing a run into it") from error
    except (OSError, ValueError) as error:
        raise _unusable(folder, error) from error
    try:
        yield path
    finally:
        # Remove the file before the lock is released: afterwards another process may hold it.
        with suppress(OSError):
            (path / LOCK).unlink()
            if is_new:
                path.rmdir()  # fails, as it should, unless the run has ended before its first file
        lock.release()


def _unusable(folder: str | Path, why: object) -> ValueError:
    shown = why.strerror if isinstance(why, OSError) else why
    return ValueError(f"output_dir: cannot use {folder}: {shown}")
