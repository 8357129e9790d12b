"""Checkpoints on the disk: each whole or not there at all, every file with its sum.

A checkpoint is written under another name, its files are flushed to the disk and listed with their
sha256 in a manifest, and a rename makes it appear. Which files lie in it is `run_state.py`'s.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from grpo_fast.data import escape_control, reason
from grpo_fast.errors import CheckpointError

FOLDER, MANIFEST, UNFINISHED = "checkpoints", "manifest.json", ".unfinished"
STATE = "state.json"  # of the run, as `run_state.py` writes it
FORMAT = 1
NAME = re.compile(r"step_(\d{6,12})(?:\+(\d{4,12}))?")


def name_of(step: int, place: int) -> str:
    """`step_000010`, or `step_000010+0002` for the second place inside the step after it."""
    return f"step_{step:06d}" + (f"+{place:04d}" if place else "")


def order_of(name: str) -> tuple[int, int]:
    """Where a name stands in the run. Raises ValueError for what is no checkpoint's name."""
    match = NAME.fullmatch(name)
    if match is None:
        raise ValueError(f"checkpoint: expected a name such as step_000010, came {name!r}")
    return int(match[1]), int(match[2] or 0)


def checkpoints_in(run: str | Path) -> list[Path]:
    """The checkpoints of a run's folder, the newest first, damaged ones among them."""
    root = Path(run) / FOLDER
    names = os.listdir(root) if root.is_dir() else []
    found = sorted((name for name in names if NAME.fullmatch(name)), key=order_of, reverse=True)
    return [root / name for name in found]


def write_checkpoint(
    run: str | Path, name: str, fill: Callable[[Path], None], about: dict[str, Any]
) -> Path:
    """Let `fill` write into an empty folder, and make that the run's checkpoint `name`.

    One that is there already, and whole, stays: the same place of a run has the same contents.

    Args:
        about: goes into the manifest; `value` is what `prune` compares.

    Raises:
        CheckpointError: the disk is full or does not allow it; nothing else has changed.
    """
    from safetensors import SafetensorError

    root = Path(run) / FOLDER
    final, part = root / name, root / f"{name}{UNFINISHED}"
    if final.is_dir() and problem_of(final) is None:
        return final
    try:
        root.mkdir(exist_ok=True)
        for unfinished in root.glob(f"*{UNFINISHED}"):
            shutil.rmtree(unfinished)
        part.mkdir()
        fill(part)
        sums = {file.relative_to(part).as_posix(): _synced_sum(file) for file in _files(part)}
        manifest = {"format": FORMAT, **about, "files": sums}
        (part / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
        _synced_sum(part / MANIFEST)
        for path in (*part.rglob("*"), part):
            if path.is_dir():
                sync(path)
        if final.exists():
            shutil.rmtree(final)
        os.replace(part, final)
        sync(root)
        sync(root.parent)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(part, ignore_errors=True)
        whole = next((path for path in checkpoints_in(run) if problem_of(path) is None), None)
        left = "there is none before it" if whole is None else f"the newest whole one is {whole}"
        said = f"checkpoint: expected to write {final}, got {reason(error)}; {left}"
        raise CheckpointError(said) from error
    return final


def problem_of(checkpoint: Path) -> str | None:
    """What is wrong with a checkpoint: a file that is missing, short or changed. None: nothing."""
    try:
        manifest = json.loads((checkpoint / MANIFEST).read_text(encoding="utf-8"))
        if manifest["format"] != FORMAT:
            return f"its format is {manifest['format']}, not {FORMAT}"
        for name, expected in manifest["files"].items():
            if _sum(checkpoint / name) != expected:
                return f"{name} is not what was written"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{MANIFEST} or a file cannot be read ({reason(error)})"
    return None


def newest(run: str | Path, say: Callable[[str], None]) -> Path | None:
    """The newest whole checkpoint of a run; of each damaged one that is passed over it is said."""
    for path in checkpoints_in(run):
        problem = problem_of(path)
        if problem is None:
            return path
        say(escape_control(f"checkpoint {path} is damaged and passed over: {problem}"))
    return None


def read_state(checkpoint: Path) -> dict[str, Any]:
    """What lies in a checkpoint's state.json."""
    return json.loads((checkpoint / STATE).read_text(encoding="utf-8"))


def prune(latest: Path, keep: int) -> None:
    """Leave the `keep` newest checkpoints up to `latest`, and the one of the best `value`.

    Newer ones, which a run that went back has left, are damaged or will be met again.
    """
    place = order_of(latest.name)
    found = [p for p in checkpoints_in(latest.parent.parent) if order_of(p.name) <= place]
    values = {path: _value(path) for path in found}
    best = max(found, key=lambda path: (values[path], order_of(path.name)))
    kept = {*found[:keep], *([best] if values[best] > -math.inf else [])}
    for path in found:
        if path not in kept:
            shutil.rmtree(path, ignore_errors=True)


def sync(path: Path) -> None:
    """What was written to a file, or which names a folder holds, is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _value(checkpoint: Path) -> float:
    try:
        found = json.loads((checkpoint / MANIFEST).read_text(encoding="utf-8")).get("value")
    except (OSError, ValueError, AttributeError):
        return -math.inf
    return -math.inf if found is None else float(found)


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.rglob("*")) if path.is_file())


def _synced_sum(file: Path) -> str:
    sync(file)
    return _sum(file)


def _sum(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
