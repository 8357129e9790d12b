"""The folder of a run: its name, whether it is free, and its lock."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from grpo_fast.errors import require

LOCK = ".lock"
IN_CHECKPOINT = re.compile(r"/checkpoints/step_\d+[^/]*(/|$)")
NOTHING = {LOCK, "config.yaml.tmp"}  # what a run that ended at its start leaves behind


class OutputFolderError(ValueError):
    """The output folder cannot be used. The message says why and what to do."""


def run_folder(root: str | Path, name: str) -> Path:
    """Return the folder `name` in `root`. Raises OutputFolderError for a name that leaves it."""
    place, is_plain = Path(root) / name, name.isprintable() and not {*"/\\:"} & {*name}
    fits = is_plain and name.strip() and place.resolve().parent == Path(root).resolve()
    require(fits, "name", f"a plain folder name inside {root}", repr(name), OutputFolderError)
    return place


def free_folder(folder: str | Path) -> Path:
    """Return the first of `folder`, `folder`-2, `folder`-3 … that holds no run."""
    base = Path(folder)
    numbered = (base.with_name(f"{base.name}-{number}") for number in itertools.count(2))
    return next(path for path in itertools.chain([base], numbered) if not is_occupied(path))


def is_occupied(folder: str | Path) -> bool:
    """Return whether the folder holds files. Raises OutputFolderError if it is not a folder."""
    try:
        return os.path.isdir(folder) and bool({*os.listdir(folder)} - NOTHING)
    except (OSError, ValueError) as error:
        raise _unusable(folder, error) from error


def check_folder(folder: str | Path) -> None:
    """Raise OutputFolderError for an existing folder that is occupied or not writable."""
    if is_occupied(folder):
        occupants = sorted({*os.listdir(folder)} - NOTHING)
        listed = ", ".join(occupants[:3]) + (", …" if len(occupants) > 3 else "")
        raise OutputFolderError(
            f"output_dir: {folder} is occupied (it holds {listed}); choose an empty or new folder "
            "with output_dir=… or --name …"
        )
    if not os.access(folder, os.W_OK | os.X_OK):
        raise _unusable(folder, "it is not writable")


@contextmanager
def locked(folder: str | Path) -> Iterator[Path]:
    """Create the folder if it is missing, and keep all other processes out of it.

    A folder that is empty at the end is removed. Raises OutputFolderError if another process has
    the folder, or if it cannot be created.
    """
    path, lock = Path(folder), FileLock(Path(folder) / LOCK, timeout=0)
    missing = [place for place in (path, *path.parents) if not os.path.lexists(place)]
    try:
        if IN_CHECKPOINT.search(os.path.realpath(path)):
            raise ValueError("it is in a checkpoint, which it would damage")
        path.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout as error:
        said = "another process is writing a run into it"
        raise OutputFolderError(f"output_dir: cannot use {folder}: {said}") from error
    except (OSError, ValueError) as error:
        raise _unusable(folder, error) from error
    try:
        yield path
    finally:
        # Before the lock is released: another process may be waiting for the file.
        with suppress(OSError):
            (path / LOCK).unlink()
            for place in missing:
                place.rmdir()
        lock.release()


def _unusable(folder: str | Path, reason: object) -> OutputFolderError:
    shown = reason.strerror if isinstance(reason, OSError) else reason
    return OutputFolderError(f"output_dir: cannot use {folder} as a folder: {shown}")
