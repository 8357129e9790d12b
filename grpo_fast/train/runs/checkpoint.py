"""Checkpoints on the disk: safetensors and JSON, each file with its size and sha256 in a manifest.

All ranks write into a folder with another name. A rename, the last step, makes the checkpoint
appear, so that a process that is killed at any moment leaves a complete checkpoint or none.
"""

from __future__ import annotations

import itertools
import math
import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

import pydantic
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from grpo_fast.data import escape_control, reason
from grpo_fast.errors import CheckpointError, require
from grpo_fast.train.files import read_regular, sha256_of, sync
from grpo_fast.train.ranks import distributed

FOLDER, MANIFEST, UNFINISHED, ASIDE = "checkpoints", "manifest.json", ".unfinished", ".aside"
WEIGHTS, TOKENIZER = "weights", "tokenizer"
FORMAT: Literal[5] = 5
FILE_BYTES = 1 << 28  # of a file of tensors: the writer holds two copies of its bytes in memory
NAME = re.compile(r"step_(\d{6,12})")


class Manifest(pydantic.BaseModel, strict=True, extra="forbid"):
    """The files of a checkpoint, each with its bytes and its sha256."""

    format: Literal[5] = FORMAT
    value: float | None  # of the metric `checkpoint.best`
    files: dict[str, tuple[int, str]]


class FormatError(ValueError):
    """The checkpoint was written by another version of this package. It is not damaged."""


def step_of(checkpoint: Path) -> int:
    """Return the step in a checkpoint's name. Raises ValueError for any other name."""
    match = NAME.fullmatch(checkpoint.name)
    require(match, "checkpoint", "a name such as step_000010", repr(checkpoint.name))
    return int(match[1])  # type: ignore[index]


def checkpoints_in(run: str | Path) -> list[Path]:
    """Return the checkpoints in a run's folder, damaged ones included, the newest first."""
    root = Path(run) / FOLDER
    found = [path for path in root.iterdir() if NAME.fullmatch(path.name)] if root.is_dir() else []
    return sorted(found, key=step_of, reverse=True)


def newest(run: str | Path, say: Callable[[str], None] = lambda _: None) -> Path | None:
    """Return the newest complete checkpoint of a run; `say` hears of each damaged newer one."""
    for path in checkpoints_in(run):
        problem = problem_of(path)
        if problem is None:
            return path
        say(escape_control(f"checkpoint {path} is damaged and passed over: {problem}"))
    return None


def read_manifest(checkpoint: Path) -> Manifest:
    """Read the manifest of a checkpoint. Raises FormatError for one of another version."""
    text = read_regular(checkpoint / MANIFEST)
    with suppress(pydantic.ValidationError):
        was = pydantic.TypeAdapter(dict[str, Any]).validate_json(text).get("format")
        if isinstance(was, int) and was != FORMAT:
            raise FormatError(
                f"resume: expected a checkpoint of format {FORMAT}, which this version writes and "
                f"reads, got format {was} in {checkpoint}; use the version that wrote it, or "
                "another output_dir"
            )
    return Manifest.model_validate_json(text)


def problem_of(checkpoint: Path) -> str | None:
    """Say what is wrong with the files of a checkpoint; None if they are as they were written."""
    try:
        files, present = read_manifest(checkpoint).files, _files(checkpoint)
        for name in sorted(present ^ {MANIFEST, *files}):
            return f"{name} is {'not in the manifest' if name in present else 'missing'}"
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
    with suppress(FormatError):
        return problem_of(checkpoint) is None
    return False


def write_checkpoint(
    run: str | Path, step: int, tensors: Mapping[str, Tensor], fill: Callable[[Path], None],
    value: float | None = None,
) -> Path:  # fmt: skip
    """Write the checkpoint of a step, unless it exists. Collective.

    Args:
        tensors: weights and moments; each rank writes the shards that it has.
        fill: writes the other files into the folder that it is given, on rank 0.
        value: of the metric by which `prune` finds the best checkpoint.

    Raises CheckpointError if the disk is full or read-only; the older checkpoints stay.
    """
    final = Path(run) / FOLDER / f"step_{step:06d}"
    part = final.with_name(final.name + UNFINISHED)
    if distributed.from_main(lambda: is_whole(final)):
        return final
    try:
        with _named(final):
            distributed.from_main(lambda: _begin(part, fill))
            write_tensors(part / WEIGHTS, tensors)
            with distributed.together():
                own = sorted(_files(part))[distributed.rank() :: distributed.size()]
                for name in own:
                    sync(part / name)
                sums = {name: sha256_of(part / name) for name in own}
            every = distributed.gather(sums)
            files = {name: (size, sum_) for each in every for name, (size, sum_) in each.items()}
            manifest = Manifest(value=value, files=files)
            distributed.from_main(lambda: _finish(part, final, manifest))
    except CheckpointError:
        if distributed.is_main():
            shutil.rmtree(part, ignore_errors=True)
        raise
    return final


def _begin(part: Path, fill: Callable[[Path], None]) -> None:
    part.parent.mkdir(exist_ok=True)
    for unfinished in part.parent.glob(f"*{UNFINISHED}"):
        shutil.rmtree(unfinished)
    part.mkdir()
    fill(part)


def _finish(part: Path, final: Path, manifest: Manifest) -> None:
    if _files(part) != manifest.files.keys():
        raise OSError(f"{part} is not a folder that all ranks share")
    (part / MANIFEST).write_text(manifest.model_dump_json(indent=1) + "\n", encoding="utf-8")
    # The files and their names are on the disk before the rename is.
    sync(part / MANIFEST)
    for path in (*part.rglob("*"), part):
        if path.is_dir():
            sync(path)
    set_aside(final)  # a damaged one: os.replace replaces no folder that has files
    os.replace(part, final)
    sync(final.parent)
    sync(final.parent.parent)


@contextmanager
def _named(final: Path) -> Iterator[None]:
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, ValueError, SafetensorError) as error:
        said = f"checkpoint: expected to write {final}, got {reason(error)}"
        raise CheckpointError(said) from error


def set_aside(checkpoint: Path) -> None:
    """Rename a checkpoint, if it exists, so that no run resumes from it."""
    if checkpoint.exists():
        names = (f"{checkpoint.name}{ASIDE}-{number}" for number in itertools.count(1))
        free = (path for path in map(checkpoint.with_name, names) if not path.exists())
        os.replace(checkpoint, next(free))


def prune(run: str | Path, keep: int) -> None:
    """Remove all checkpoints of a run but the `keep` newest and the best one."""
    values = dict[Path, float]()
    for path in checkpoints_in(run):
        with suppress(OSError, ValueError):
            value = read_manifest(path).value
            values[path] = -math.inf if value is None else value
    best = max(values, key=lambda path: (values[path], step_of(path)))
    spared = {*list(values)[:keep], *([best] if values[best] > -math.inf else [])}
    for path in values.keys() - spared:
        shutil.rmtree(path, ignore_errors=True)


def _files(folder: Path) -> set[str]:
    paths = (path for path in folder.rglob("*") if not path.is_dir())
    return {path.relative_to(folder).as_posix() for path in paths}


# ------------------------------------------------- tensors, by torch.distributed.checkpoint
def write_tensors(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors into a new folder. Collective: every rank writes its shards."""
    files, size = dict[str, int](), 0
    for name, tensor in tensors.items():  # the writer counts files from 1
        files[name] = size // FILE_BYTES + 1
        size += tensor.numel() * tensor.element_size()
    writer = dcp.HuggingFaceStorageWriter(str(folder), files, save_distributed=True)
    with _plain_errors():
        dcp.save(dict(tensors), storage_writer=writer, no_dist=distributed.size() == 1)


def stored_tensors(folder: Path) -> dict[str, str]:
    """Return the dtype and shape of each stored tensor, by name."""
    found = dcp.HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    return {name: f"{x.properties.dtype} {tuple(x.size)}" for name, x in found.items()}  # type: ignore[union-attr]


def read_tensors(folder: Path, into: Mapping[str, Tensor], prefix: str = "") -> None:
    """Fill tensors with the stored tensors of the same names. Collective.

    Raises ValueError for another name (among those that begin with `prefix`), dtype or shape.
    """
    with distributed.together():
        stored = {k: v for k, v in stored_tensors(folder).items() if k.startswith(prefix)}
        expected = {name: f"{x.dtype} {tuple(x.shape)}" for name, x in into.items()}
        for name in sorted(stored.keys() | expected.keys()):
            own, came = expected.get(name, "no such tensor"), stored.get(name, "none")
            require(own == came, f"the tensor {name}", own, came)
    reader = dcp.HuggingFaceStorageReader(str(folder))
    with _plain_errors():
        dcp.load(dict(into), storage_reader=reader, no_dist=distributed.size() == 1)


@contextmanager
def _plain_errors() -> Iterator[None]:
    """Raise the error of the first rank that failed in place of torch's own BaseException."""
    try:
        with warnings.catch_warnings():  # one process is what is meant
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            yield
    except CheckpointException as error:
        number, (cause, _) = min(error.failures.items())
        text = f"rank {number}: {cause}" if distributed.size() > 1 else str(cause)
        raise (OSError if isinstance(cause, OSError) else ValueError)(text) from error
