"""Reading and writing of checkpoint folders.

A checkpoint consists of safetensors and JSON files, and a manifest with their SHA-256 hashes. It is
first written into a folder with a temporary name, which gets its final name at the end. A process
that is killed during writing therefore never leaves an incomplete checkpoint with a final name.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import pydantic
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from grpo_fast.data import escape_control, reason
from grpo_fast.errors import WriteError, require
from grpo_fast.train.files import read_regular, sha256_of, sync, write_on_main
from grpo_fast.train.ranks import distributed

log = logging.getLogger(__name__)

FOLDER = "checkpoints"
MANIFEST = "manifest.json"
UNFINISHED = ".unfinished"
WEIGHTS = "weights"
TOKENIZER = "tokenizer"
FORMAT = 8
# Approximate size of a tensor file. While a file is written, two copies of it are in memory.
FILE_BYTES = 1 << 28
STEP = "step_"  # prefix of the name of a checkpoint's folder
NAME = re.compile(rf"{STEP}\d{{6,12}}")


class Manifest(pydantic.BaseModel, strict=True):
    """Manifest of a checkpoint: the format version, and the SHA-256 hash of each file."""

    format: int
    files: dict[str, str] = {}


def step_of(checkpoint: Path) -> int:
    """Return the step number from a folder name such as step_000010."""
    return int(checkpoint.name.removeprefix(STEP))


def checkpoints_in(run: str | Path) -> list[Path]:
    """Return all checkpoints in a run's folder, including damaged ones, from newest to oldest."""
    root = Path(run) / FOLDER
    found = [path for path in root.iterdir() if NAME.fullmatch(path.name)] if root.is_dir() else []
    return sorted(found, key=step_of, reverse=True)


def newest(run: str | Path) -> Path | None:
    """Return the newest complete checkpoint of a run, or None. Warn about damaged checkpoints."""
    for path in checkpoints_in(run):
        problem = problem_of(path)
        if problem is None:
            return path
        log.warning(escape_control(f"checkpoint {path} is damaged and passed over: {problem}"))
    return None


def problem_of(checkpoint: Path) -> str | None:
    """Compare the files of a checkpoint with its manifest.

    Returns:
        A description of the first damaged or missing file, or None if the checkpoint is complete.

    Raises:
        ValueError: another version of the package wrote the checkpoint, which is not damaged.
    """
    try:
        manifest = Manifest.model_validate_json(read_regular(checkpoint / MANIFEST))
        is_readable = manifest.format == FORMAT
        if is_readable:
            require(manifest.files, "files", "the files of the checkpoint", "none")
            for name, digest in manifest.files.items():
                if sha256_of(checkpoint / name) != digest:
                    return f"{name} is not what was written"
    except FileNotFoundError as error:
        return f"{os.path.relpath(error.filename, checkpoint)} is missing"
    except (OSError, ValueError) as error:
        return f"{MANIFEST} or a file cannot be read ({reason(error)})"
    expected = f"a checkpoint of format {FORMAT}, which this version writes and reads"
    came = f"format {manifest.format} in {checkpoint}"
    advice = "use the version that wrote it, or another output_dir"
    require(is_readable, "resume", expected, f"{came}; {advice}")
    return None


def write_checkpoint(
    run: str | Path, step: int, tensors: Mapping[str, Tensor], fill: Callable[[Path], None]
) -> Path:
    """Write a checkpoint, unless a complete checkpoint of the step exists.

    All ranks must call this.

    Args:
        run: folder of the run.
        step: number of finished steps.
        tensors: the tensors, keyed by name. For a sharded tensor, each rank passes its shard.
        fill: function that writes all other files into the folder that it receives. Only rank 0
            calls it.

    Returns:
        The folder of the checkpoint.

    Raises:
        WriteError: the disk is full or read-only. Older checkpoints stay intact.
    """
    final = Path(run) / FOLDER / f"{STEP}{step:06d}"
    part = final.with_name(final.name + UNFINISHED)
    if distributed.from_main(lambda: final.exists() and problem_of(final) is None):
        return final
    try:
        write_on_main(part, lambda: _begin(part, fill))
        write_tensors(part / WEIGHTS, tensors)
        write_on_main(final, lambda: _finish(part, final))
    except WriteError:
        if distributed.is_main():
            shutil.rmtree(part, ignore_errors=True)
        raise
    return final


def _begin(part: Path, fill: Callable[[Path], None]) -> None:
    part.parent.mkdir(exist_ok=True)
    for unfinished in part.parent.glob(f"*{UNFINISHED}"):
        shutil.rmtree(unfinished)
    (part / WEIGHTS).mkdir(parents=True)
    fill(part)


def _finish(part: Path, final: Path) -> None:
    """Write the manifest, flush all files to disk, and give the folder its final name."""
    files = sorted(path for path in part.rglob("*") if path.is_file())
    sums = {path.relative_to(part).as_posix(): sha256_of(path) for path in files}
    manifest = Manifest(format=FORMAT, files=sums)
    (part / MANIFEST).write_text(manifest.model_dump_json(indent=1) + "\n", encoding="utf-8")
    # Flush files and directory entries before the rename. Otherwise a power cut could leave a
    # checkpoint with its final name and empty files.
    for path in (*part.rglob("*"), part):
        sync(path)
    set_aside(final)  # os.replace cannot overwrite a damaged checkpoint of the same step
    os.replace(part, final)
    sync(final.parent)
    sync(final.parent.parent)


def set_aside(checkpoint: Path) -> None:
    """Rename the folder of a damaged checkpoint, if it exists, so that no run uses it."""
    if checkpoint.exists():
        os.replace(checkpoint, f"{checkpoint}.damaged-{time.time_ns()}")


def prune(run: str | Path, keep: int) -> None:
    """Remove all checkpoints of a run except the `keep` newest ones."""
    for path in checkpoints_in(run)[keep:]:
        shutil.rmtree(path, ignore_errors=True)


def write_tensors(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors into files of about FILE_BYTES each. All ranks must call this.

    Sharded tensors are gathered one after the other, and rank 0 writes them. At any time, only the
    gathered tensors of one file are in memory.
    """
    names = list(tensors)
    full: dict[str, Tensor] = {}
    size = number = 0
    for name in names:
        tensor = distributed.full_tensor(tensors[name].detach())
        size += tensor.nbytes
        if distributed.is_main():
            full[name] = tensor.cpu().contiguous()
        if size >= FILE_BYTES or name == names[-1]:
            path = folder / f"{number:05d}.safetensors"
            write_on_main(path, partial(save_file, full, path))
            full = {}
            size = 0
            number += 1


def stored_in(folder: Path) -> dict[str, Path]:
    """Find the file of each stored tensor.

    Returns:
        A dict from the name of a tensor to the path of its file.
    """
    found: dict[str, Path] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            found |= dict.fromkeys(file.keys(), path)
    return found


def read_part(stored: Mapping[str, Path], prefix: str) -> dict[str, Tensor]:
    """Read the tensors whose names begin with a prefix, and remove the prefix from the names."""
    part = {}
    for name, path in stored.items():
        if name.startswith(prefix):
            with safe_open(path, "pt") as file:
                part[name.removeprefix(prefix)] = file.get_tensor(name)
    return part


@torch.no_grad()
def read_tensors(stored: Mapping[str, Path], into: Mapping[str, Tensor]) -> None:
    """Copy stored tensors into existing tensors of the same names.

    Args:
        stored: the file of each stored tensor, from `stored_in`.
        into: the tensors to fill, keyed by name. For a sharded tensor, only this rank's shard is
            filled.

    Raises:
        ValueError: a tensor is missing in `stored` or `into`, or its dtypes or shapes differ.
    """
    for name in sorted(stored.keys() | into.keys()):
        expected = "no such tensor"
        if name in into:
            expected = f"{into[name].dtype} {tuple(into[name].shape)}"
        came = "none"
        if name in stored:
            tensor = read_part({name: stored[name]}, name)[""]
            came = f"{tensor.dtype} {tuple(tensor.shape)}"
        require(expected == came, f"the tensor {name}", expected, came)
        distributed.fill_(into[name], tensor)
