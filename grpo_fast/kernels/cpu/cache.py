"""The folder of compiled libraries: where it is, whose it must be, which of its files are whole.

The name of a library ends in the sha256 of its content: one that a crash or a full disk cut short
never reaches dlopen, where it would be a SIGBUS that no code can catch.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

logger = logging.getLogger("grpo_fast")

_SCRATCH = "grpo-fast-build-"
_SCRATCH_NAME = re.compile(_SCRATCH + r"[a-z0-9_]{8}")  # what tempfile makes of the prefix
# Ages, not process ids: those who build into a network drive or a volume may be on other machines.
SWEPT_AFTER_S = 3600


def cache_folder() -> Path:
    """$GRPO_FAST_CACHE, else ~/.cache/grpo_fast. Raises ValueError where there is no home."""
    wanted = os.environ.get("GRPO_FAST_CACHE") or "~/.cache/grpo_fast"
    try:
        return Path(wanted).expanduser()
    except RuntimeError as error:  # neither HOME nor an entry in the list of users
        expected = "expected a folder for compiled libraries"
        raise ValueError(f"GRPO_FAST_CACHE: {expected}, got {wanted}: {error}") from error


def find_or_build(folder: Path, stem: str, build: Callable[[Path], None]) -> Path:
    """The library whose name begins with `stem`: from the folder, else from `build(output)`.

    It appears there by one rename, so any number of processes may build it at the same time.

    Raises:
        OSError: the folder cannot be made, read or written.
        ValueError: it belongs to another user, whose code would run here.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if not _is_trusted(folder):
        came = f"{folder}, which belongs to uid {folder.stat().st_uid}"
        raise ValueError(f"GRPO_FAST_CACHE: expected a folder of this user, got {came}")
    _sweep(folder)
    libraries = list(folder.glob(f"{stem}-*.so"))
    for path in libraries:
        if _is_intact(path, stem):
            return path
        logger.warning("grpo_fast: %s is damaged or another user's, compiling again", path)
    with tempfile.TemporaryDirectory(dir=folder, prefix=_SCRATCH) as scratch:
        output = Path(scratch) / f"{stem}.so"
        build(output)
        target = folder / _name(output, stem)
        os.replace(output, target)
    for path in libraries:
        if path != target and not _is_intact(path, stem):
            with contextlib.suppress(OSError):
                path.unlink()
    return target


def _sweep(folder: Path) -> None:
    for entry in folder.iterdir():
        if _SCRATCH_NAME.fullmatch(entry.name):
            with contextlib.suppress(OSError):
                if time.time() - entry.stat(follow_symlinks=False).st_mtime > SWEPT_AFTER_S:
                    shutil.rmtree(entry)


def _is_intact(path: Path, stem: str) -> bool:
    try:
        return path.name == _name(path, stem) and _is_trusted(path)
    except OSError:  # another process was faster, or it is not ours to read
        return False


def _name(path: Path, stem: str) -> str:
    return f"{stem}-{hashlib.sha256(path.read_bytes()).hexdigest()}.so"


def _is_trusted(path: Path) -> bool:
    return path.stat().st_uid in (0, os.geteuid())
