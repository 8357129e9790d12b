"""The folder of a run: its name, whether it is free, and its making."""

from __future__ import annotations

import fcntl
import itertools
import os
import unicodedata
import weakref
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
    """Raise OutputFolderError for a folder that is occupied or not writable. Creates nothing."""
    try:
        existing = _nearest_existing(Path(folder).absolute())
        occupants = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
    except (OSError, ValueError) as error:
        raise _unusable(folder, error) from error
    if occupants:
        listed = ", ".join(occupants[:3]) + (", …" if len(occupants) > 3 else "")
        raise OutputFolderError(
            f"output_dir: {folder} is occupied (it holds {listed}); choose an empty or new folder "
            "with output_dir=… or --name …"
        )
    if not os.path.isdir(existing):
        raise _unusable(folder, f"{existing} is no folder")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise _unusable(folder, f"{existing} is not writable")


def claim_folder(folder: str | Path) -> Path:
    """The folder, made where it does not exist; as `check_folder`."""
    check_folder(folder)
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unusable(folder, error) from error
    return Path(folder)


class FolderLock:
    """A folder that is this process's alone until `release` or its end, by a lock of the kernel's.

    Raises OutputFolderError if another has it.
    """

    def __init__(self, folder: str | Path) -> None:
        try:
            handle = os.open(folder, os.O_RDONLY)
        except OSError as error:
            raise _unusable(folder, error) from error
        self.release = weakref.finalize(self, os.close, handle)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.release()
            said = "another process is writing a run into it"
            raise OutputFolderError(f"output_dir: cannot use {folder}: {said}") from None
        except OSError:  # a file system without locks
            pass


def _nearest_existing(path: Path) -> Path:
    for candidate in (path, *path.parents):
        try:
            os.lstat(candidate)
            return candidate
        except FileNotFoundError:
            continue
    return path


def _unusable(folder: str | Path, reason: object) -> OutputFolderError:
    shown = reason.strerror if isinstance(reason, OSError) else reason
    return OutputFolderError(f"output_dir: cannot use {folder} as a folder: {shown}")
