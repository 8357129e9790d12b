"""Cache folder of the compiled C++ libraries, with checks of its owner and of its files.

The file name of a library ends with the sha256 of its content. The hash is checked before the
library is loaded, because loading a truncated file (after a crash or on a full disk) would kill the
process with SIGBUS.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

logger = logging.getLogger("grpo_fast")


def cache_folder() -> Path:
    """Return the cache folder: $GRPO_FAST_CACHE if it is set, otherwise ~/.cache/grpo_fast.

    Raises:
        ValueError: the user has no home folder.
    """
    wanted = os.environ.get("GRPO_FAST_CACHE") or "~/.cache/grpo_fast"
    try:
        return Path(wanted).expanduser()
    except RuntimeError as error:  # neither HOME nor a passwd entry exists
        expected = "expected a folder for compiled libraries"
        raise ValueError(f"GRPO_FAST_CACHE: {expected}, got {wanted}: {error}") from error


def find_or_build(folder: Path, stem: str, build: Callable[[Path], None]) -> Path:
    """Return the library whose name begins with `stem`, building it if necessary.

    A finished build is moved into the folder by an atomic rename, so several processes may build at
    the same time.

    Args:
        folder: the cache folder.
        stem: beginning of the file name, which identifies the sources, flags, compiler and CPU.
        build: function that compiles the library and writes it to the path that it receives.

    Raises:
        OSError: the folder cannot be created, read or written.
        ValueError: the folder belongs to another user, whose code would then run in this process.
    """
    # Give only this user access to the folder (mode 0700), because code in the folder is executed.
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if not _is_trusted(folder):
        came = f"{folder}, which belongs to uid {folder.stat().st_uid}"
        raise ValueError(f"GRPO_FAST_CACHE: expected a folder of this user, got {came}")
    libraries = list(folder.glob(f"{stem}-*.so"))
    for path in libraries:
        if _is_intact(path, stem):
            return path
        logger.warning("grpo_fast: %s is damaged or another user's, compiling again", path)
    with tempfile.TemporaryDirectory(dir=folder, prefix="grpo-fast-build-") as scratch:
        output = Path(scratch) / f"{stem}.so"
        build(output)
        target = folder / _name(output, stem)
        # os.replace is atomic, so other processes see either no file or the complete file.
        os.replace(output, target)
    # Remove damaged libraries after the build, so that a build that fails removes nothing.
    for path in libraries:
        if path != target and not _is_intact(path, stem):
            with contextlib.suppress(OSError):
                path.unlink()
    return target


def _is_intact(path: Path, stem: str) -> bool:
    """Return whether a library has a trusted owner and its content matches the hash in its name."""
    try:
        return path.name == _name(path, stem) and _is_trusted(path)
    except OSError:  # removed by another process, or not readable
        return False


def _name(path: Path, stem: str) -> str:
    return f"{stem}-{hashlib.sha256(path.read_bytes()).hexdigest()}.so"


def _is_trusted(path: Path) -> bool:
    # Trust files that belong to root or to this user.
    return path.stat().st_uid in (0, os.geteuid())
