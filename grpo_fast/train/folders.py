"""Folders that a user names: the home folder written out, and the folder a run writes to."""

from __future__ import annotations

import os
import unicodedata
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator


class OutputFolderError(ValueError):
    """The output folder cannot be used; the message says why and what to do."""


def home_path(path: str) -> str:
    """`path` with its `~` written out. Raises ValueError where that stands for no home folder."""
    expanded = os.path.expanduser(path)
    if expanded.startswith("~"):
        raise ValueError("expected the home folder of a known user behind ~ (./~ is a file's name)")
    return expanded


# A setting whose `~` is written out once, where it is read, for all who use the path.
UserPath = Annotated[str, AfterValidator(home_path)]


def run_folder(root: str | Path, name: str | None = None) -> Path:
    """`root`, or the folder `name` directly inside it. Raises OutputFolderError for a name that leads anywhere else."""
    base = Path(root)
    if name is None:
        return base
    bad = not name.strip() or name in (".", "..") or any(c in "/\\:" or unicodedata.category(c)[0] == "C" for c in name)
    if bad or (base / name).resolve().parent != base.resolve():
        raise OutputFolderError(f"name: expected a plain folder name inside {base}, got {name!r}")
    return base / name


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
    """The folder, made where it does not exist. Raises OutputFolderError as `check_folder` does."""
    check_folder(folder)
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unusable(folder, error) from error
    return Path(folder)


def _nearest_existing(path: Path) -> Path:
    """`path`, or what is there above it. Raises OSError or ValueError for an impossible path."""
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
