"""Functions that name, check and lock the folder of a run."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

LOCK = ".lock"
IGNORED = {LOCK, "config.yaml.tmp"}  # a run that failed at its start can leave these files


def free_folder(folder: str | Path) -> Path:
    """Return the first of `folder`, `folder`-2, `folder`-3 and so on that contains no run."""
    base = Path(folder)
    numbered = (base.with_name(f"{base.name}-{number}") for number in itertools.count(2))
    return next(path for path in itertools.chain([base], numbered) if not is_occupied(path))


def is_occupied(folder: str | Path) -> bool:
    """Return True if the folder contains any files other than those that a failed start leaves.

    Raises:
        ValueError: the folder cannot be listed.
    """
    try:
        return os.path.isdir(folder) and bool({*os.listdir(folder)} - IGNORED)
    except OSError as error:
        raise _unusable(folder, error) from error


def check_folder(folder: str | Path) -> None:
    """Raise a ValueError if a folder is not empty."""
    if is_occupied(folder):
        listed = ", ".join(sorted({*os.listdir(folder)} - IGNORED)[:3])
        advice = "choose an empty or new folder with output_dir=…"
        raise ValueError(f"output_dir: {folder} is occupied (it holds {listed}); {advice}")


@contextmanager
def locked(folder: str | Path) -> Iterator[Path]:
    """Create the folder if necessary, and lock it against other processes inside this context.

    Raises:
        ValueError: another process holds the lock, or the folder cannot be created.
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
        # Remove the lock file before the lock is released. After the release, a different process
        # could already hold a lock on this file.
        with suppress(OSError):
            (path / LOCK).unlink()
            if is_new:
                path.rmdir()  # fails if the folder has files, which must stay
        lock.release()


def _unusable(folder: str | Path, why: object) -> ValueError:
    shown = why.strerror if isinstance(why, OSError) else why
    return ValueError(f"output_dir: cannot use {folder}: {shown}")
