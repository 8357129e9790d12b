"""The folder of a run: its name, whether it is free, its making and its lock."""

from __future__ import annotations

import fcntl
import itertools
import os
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from grpo_fast.errors import require


class OutputFolderError(ValueError):
    """The output folder cannot be used; the message says why and what to do."""


def run_folder(root: str | Path, name: str) -> Path:
    """The folder `name` inside `root`. Raises OutputFolderError for a name that leads elsewhere."""
    base = Path(root)
    bad = any(c in "/\\:" or unicodedata.category(c)[0] == "C" for c in name)
    bad = bad or not name.strip() or name in (".", "..")
    fits = not bad and (base / name).resolve().parent == base.resolve()
    require(fits, "name", f"a plain folder name inside {base}", repr(name), OutputFolderError)
    return base / name


def free_folder(folder: str | Path) -> Path:
    """`folder`, or where a run lies in it the first of `folder`-2, `folder`-3 … without one."""
    base = Path(folder)
    numbered = (base.with_name(f"{base.name}-{number}") for number in itertools.count(2))
    return next(path for path in itertools.chain([base], numbered) if not is_occupied(path))


def is_occupied(folder: str | Path) -> bool:
    """Whether files lie in the folder. Raises OutputFolderError for what is no folder."""
    try:
        return os.path.isdir(folder) and bool(os.listdir(folder))
    except (OSError, ValueError) as error:
        raise _unusable(folder, error) from error


def check_folder(folder: str | Path) -> None:
    """Raise OutputFolderError for an existing folder that is occupied or not writable."""
    if is_occupied(folder):
        occupants = sorted(os.listdir(folder))
        listed = ", ".join(occupants[:3]) + (", …" if len(occupants) > 3 else "")
        raise OutputFolderError(
            f"output_dir: {folder} is occupied (it holds {listed}); choose an empty or new folder "
            "with output_dir=… or --name …"
        )
    if not os.access(folder, os.W_OK | os.X_OK):
        raise _unusable(folder, "it is not writable")


@contextmanager
def locked(folder: str | Path) -> Iterator[Path]:
    """A folder that is this process's alone, by a lock of the kernel's; made where it is missing.

    Folders that were made and stay empty are removed at the end. Raises OutputFolderError if
    another process has the folder, or it cannot be made.
    """
    path = Path(folder)
    missing = [place for place in (path, *path.parents) if not os.path.lexists(place)]
    try:
        path.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_RDONLY)
    except (OSError, ValueError) as error:
        raise _unusable(folder, error) from error
    try:
        if not _takes_lock(handle, path):
            said = "another process is writing a run into it"
            raise OutputFolderError(f"output_dir: cannot use {folder}: {said}")
        try:
            yield path
        finally:  # with the lock still held: the empty folder of another run must stay
            with suppress(OSError):
                for place in missing:
                    place.rmdir()
    finally:
        os.close(handle)


def _takes_lock(handle: int, folder: Path) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return True
    # A process that had the lock may have removed the folder after it was opened here.
    return folder.exists() and os.path.samefile(handle, folder)


def _unusable(folder: str | Path, reason: object) -> OutputFolderError:
    shown = reason.strerror if isinstance(reason, OSError) else reason
    return OutputFolderError(f"output_dir: cannot use {folder} as a folder: {shown}")
