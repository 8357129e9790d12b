"""Checkpoints on the disk: each whole or not there at all, every file with its size and sha256.

All ranks write into a folder of another name, each flushes and hashes the files that it wrote, rank
0 lists them in a manifest, and a rename makes the checkpoint appear.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from torch import Tensor

from grpo_fast.data import escape_control, reason
from grpo_fast.errors import CheckpointError, require
from grpo_fast.train.config.base import Count
from grpo_fast.train.files import read_regular, sha256_of, sync
from grpo_fast.train.ranks import distributed
from grpo_fast.train.runs.storage import owned_files, write_tensors

FOLDER, MANIFEST, UNFINISHED, ASIDE = "checkpoints", "manifest.json", ".unfinished", ".aside"
STATE, STATE_TENSORS = "state.json", "state.safetensors"
WEIGHTS, TOKENIZER = "weights", "tokenizer"
FORMAT = 4
MOST_BYTES = 1 << 24  # of a manifest
NAME = re.compile(r"step_(\d{6,12})(?:\+(\d{4,12}))?")


Part = TypeVar("Part")
STRICT = ConfigDict(strict=True, extra="forbid")  # of it, and of the dataclasses inside
Sum = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
# Files of a checkpoint, and no others: no code, no pickle, no path that leads out of it.
FileName = Annotated[
    str,
    Field(
        pattern=r"^(state\.(json|safetensors)|weights/shard-\d{5}-model-\d{5}-of-\d{5}\.safetensors"
        r"|tokenizer/[A-Za-z0-9_-]+\.(json|jinja|txt|model))$"
    ),
]


@dataclass
class Format:
    format: int  # the part of a manifest that every format has


@dataclass
class Manifest:
    """The files of a checkpoint with their bytes and sha256; `run` tells runs apart."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    format: int
    run: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
    step: Count
    value: float | None  # which `prune` compares
    files: dict[FileName, tuple[Count, Sum]]


class FormatError(ValueError):
    """A checkpoint of another version of this package: not damaged, and not readable here."""


def name_of(step: int, place: int) -> str:
    """`step_000010`, or `step_000010+0002` for the second place inside the step after it."""
    return f"step_{step:06d}" + (f"+{place:04d}" if place else "")


def order_of(name: str) -> tuple[int, int]:
    """Where a name stands in the run. Raises ValueError for what is no checkpoint's name."""
    match = NAME.fullmatch(name)
    require(match, "checkpoint", "a name such as step_000010", repr(name))
    return int(match[1]), int(match[2] or 0)


def checkpoints_in(run: str | Path) -> list[Path]:
    """The checkpoints of a run's folder, the newest first, damaged ones among them."""
    root = Path(run) / FOLDER
    names = os.listdir(root) if root.is_dir() else []
    ordered = sorted((name for name in names if NAME.fullmatch(name)), key=order_of, reverse=True)
    return [root / name for name in ordered]


def write_checkpoint(
    run: str | Path, name: str, tensors: dict[str, Any], fill: Callable[[Path], None],
    about: dict[str, Any],
) -> Path:  # fmt: skip
    """Make the run's checkpoint `name`; one of this run that is there, whole, stays. Collective.

    Args:
        tensors: weights and moments, of which each rank writes its shards.
        fill: writes the other files into the folder, on rank 0.
        about: `run`, `step` and `value` of the manifest.

    Raises CheckpointError where the disk is full or does not allow it; nothing else has changed.
    """
    root = Path(run) / FOLDER
    final, part = root / name, root / f"{name}{UNFINISHED}"
    if distributed.from_main(lambda: is_whole(final) and read_manifest(final).run == about["run"]):
        return final
    try:
        with distributed.together(), _named(final):
            if distributed.is_main():
                root.mkdir(exist_ok=True)
                for unfinished in root.glob(f"*{UNFINISHED}"):
                    shutil.rmtree(unfinished)
                part.mkdir()
                fill(part)
        with _named(final):
            write_tensors(part / WEIGHTS, tensors)
        with distributed.together(), _named(final):
            mine = [f"{WEIGHTS}/{path.name}" for path in owned_files(part / WEIGHTS)]
            if distributed.is_main():
                mine += [name for name in _files(part) if not name.startswith(f"{WEIGHTS}/")]
            for name in mine:
                sync(part / name)
            sums = {name: sha256_of(part / name) for name in mine}
        sums = {file: sum_ for each in distributed.gather(sums) for file, sum_ in each.items()}
        with distributed.together(), _named(final):
            if distributed.is_main():
                _finish(part, final, {"format": FORMAT, **about, "files": sums})
    except CheckpointError:
        if distributed.is_main():
            shutil.rmtree(part, ignore_errors=True)
        raise
    return final


@contextmanager
def _named(final: Path) -> Iterator[None]:
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, ValueError, SafetensorError) as error:
        whole = next((p for p in checkpoints_in(final.parent.parent) if is_whole(p)), None)
        rest = "there is none before it" if whole is None else f"the newest whole one is {whole}"
        said = f"checkpoint: expected to write {final}, got {reason(error)}; {rest}"
        raise CheckpointError(said) from error


def _finish(part: Path, final: Path, manifest: dict[str, Any]) -> None:
    there = _files(part)
    if there != manifest["files"].keys():
        raise OSError(f"{part} is not a folder that all ranks share: {sorted(there)}")
    # Files, names, then the rename: after a crash in between no folder of this name is half there.
    (part / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    sync(part / MANIFEST)
    for path in (*part.rglob("*"), part):
        if path.is_dir():
            sync(path)
    # os.replace puts nothing in the place of a folder that has files.
    set_aside(final)
    os.replace(part, final)
    sync(final.parent)
    sync(final.parent.parent)


def set_aside(checkpoint: Path) -> None:
    """Rename a checkpoint, if there is one, so that no run goes on from it."""
    if os.path.lexists(checkpoint):
        names = (f"{checkpoint.name}{ASIDE}-{number}" for number in itertools.count(1))
        free = (x for x in map(checkpoint.with_name, names) if not os.path.lexists(x))
        os.replace(checkpoint, next(free))


def read_manifest(checkpoint: Path) -> Manifest:
    """The manifest of a checkpoint. Raises FormatError for another version's."""
    was = read_checked(Format, checkpoint / MANIFEST, MOST_BYTES).format
    if was != FORMAT:
        expected = f"expected a checkpoint of format {FORMAT}, which this version writes and reads"
        advice = "use the version that wrote it, or another output_dir"
        raise FormatError(f"resume: {expected}, got format {was} in {checkpoint}; {advice}")
    return read_checked(Manifest, checkpoint / MANIFEST, MOST_BYTES)


def problem_of(checkpoint: Path) -> str | None:
    """Name a checkpoint's fault: a file that is missing, changed, or not its own; None: sound."""
    try:
        if checkpoint.is_symlink():
            return "it is a link"
        files = read_manifest(checkpoint).files
        there = _files(checkpoint)
        for name in sorted(there ^ {MANIFEST, *files}):
            return f"{name} is {'not in the manifest' if name in there else 'missing'}"
        for name, size_and_sum in files.items():
            if sha256_of(checkpoint / name) != size_and_sum:
                return f"{name} is not what was written"
    except FormatError:
        raise
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (OSError, ValueError) as error:
        return f"{MANIFEST} or a file cannot be read ({reason(error)})"
    return None


def is_whole(checkpoint: Path) -> bool:
    try:
        return problem_of(checkpoint) is None
    except FormatError:
        return False


def newest(run: str | Path, say: Callable[[str], None]) -> Path | None:
    """The newest whole checkpoint of a run; `say` is told of each damaged one passed over."""
    for path in checkpoints_in(run):
        problem = problem_of(path)
        if problem is None:
            return path
        say(escape_control(f"checkpoint {path} is damaged and passed over: {problem}"))
    return None


def prune(latest: Path, keep: int) -> None:
    """Remove checkpoints of the run up to `latest`, but not the `keep` newest and the best one."""
    run, place, values = read_manifest(latest).run, order_of(latest.name), {}
    for path in checkpoints_in(latest.parent.parent):
        try:
            manifest = read_manifest(path)
        except (OSError, ValueError):
            continue
        if manifest.run == run and order_of(path.name) <= place:
            values[path] = -math.inf if manifest.value is None else manifest.value
    best = max(values, key=lambda path: (values[path], order_of(path.name)))
    spared = {*list(values)[:keep], *([best] if values[best] > -math.inf else [])}
    for path in values:
        if path not in spared:
            shutil.rmtree(path, ignore_errors=True)


def _files(folder: Path) -> set[str]:
    files = (path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir())
    return {path.relative_to(folder).as_posix() for path in files}


def read_checked(
    kind: type[Part], path: Path, most: int, tensors: dict[str, Tensor] | None = None
) -> Part:
    """The JSON of a regular file as a dataclass. Raises ValueError with the file and the field.

    tensors: put in the places of their names, and taken out of the dict.
    """
    try:
        return TypeAdapter(kind).validate_json(read_regular(path, most), context=tensors)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))[:200]
        at = f"{path.name}: {where}: " if where else f"{path.name}: "
        raise ValueError(at + first["msg"]) from error
