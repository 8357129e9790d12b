"""The folder of a run: its lock, files, logs and checkpoints, and checks of a resumed run.

A resumed run must have the settings, data, code and models with which the run began.
"""

from __future__ import annotations

import hashlib
import importlib.util
import itertools
import json
import logging
import os
import re
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pydantic
from filelock import FileLock, Timeout
from pydantic_core import to_jsonable_python

from grpo_fast.data import escape_control, reason
from grpo_fast.errors import WriteError, require
from grpo_fast.train import ranks
from grpo_fast.train.config import RunConfig

log = logging.getLogger(__name__)

LOCK = ".lock"
FOLDER = "checkpoints"
MANIFEST = "manifest.json"
FORMAT = 10
STEP = "step_"  # prefix of the name of a checkpoint's folder
NAME = re.compile(rf"{STEP}\d{{6,12}}")
IGNORED = {LOCK, "config.yaml.tmp"}  # a run that failed at its start can leave these files
FILES = "files"  # key under which the fingerprints are stored next to the settings
# Prefixes of the settings that may change when a run is resumed.
FREE = ("steps", "eval", "log", "checkpoint", "output_dir", "rollout.vllm", "resume",
        "resume_allow", "distributed", "distributed_replicas", "distributed_timeout")  # fmt: skip
WEIGHT_FILES = ("*.safetensors", "*.bin", "config.json", "adapter_config.json")
# Files of the policy that a resumed run reads again. They set the architecture and the prompts.
READ_AGAIN = ("config.json", "generation_config.json", "*token*.json", "tokenizer.model", "vocab.*",
              "merges.txt", "chat_template.*")  # fmt: skip


# ---------------------------------------------------------------------------------- The folder
def free_folder(folder: str | Path) -> Path:
    """Return the first of `folder`, `folder`-2, `folder`-3 and so on that contains no run."""
    base = Path(folder)
    numbered = (base.with_name(f"{base.name}-{number}") for number in itertools.count(2))
    return next(path for path in itertools.chain([base], numbered) if not is_occupied(path))


def is_occupied(folder: str | Path) -> bool:
    """Return True if the folder contains any files other than those that a failed start leaves."""
    return os.path.isdir(folder) and bool({*os.listdir(folder)} - IGNORED)


def check_folder(folder: str | Path) -> None:
    """Raise a ValueError if a folder is not empty."""
    if is_occupied(folder):
        listed = ", ".join(sorted({*os.listdir(folder)} - IGNORED)[:3])
        advice = "choose an empty or new folder with output_dir=…"
        raise ValueError(f"output_dir: {folder} is occupied (it holds {listed}); {advice}")


@contextmanager
def locked(folder: str | Path) -> Iterator[Path]:
    """Create the folder if necessary, and lock it against other processes inside this context.

    Raises:
        ValueError: another process holds the lock, or the folder cannot be created.
    """
    path = Path(folder)
    is_new = not os.path.lexists(path)
    lock = FileLock(path / LOCK, timeout=0)
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except (OSError, ValueError) as error:  # filelock's Timeout is an OSError
        why = getattr(error, "strerror", None) or error
        if isinstance(error, Timeout):
            why = "another process is writing a run into it"
        raise ValueError(f"output_dir: cannot use {folder}: {why}") from error
    try:
        yield path
    finally:
        # Remove the lock file before the lock is released. After the release, a different process
        # could already hold a lock on this file.
        with suppress(OSError):
            (path / LOCK).unlink()
            if is_new:
                path.rmdir()  # fails if the folder has files, which must stay
        lock.release()


# ----------------------------------------------------------------------------------- Its files
@contextmanager
def written(path: Path) -> Iterator[None]:
    """Convert file errors inside this context to a WriteError, whose message begins with `path`."""
    from safetensors import SafetensorError
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except (OSError, SafetensorError, CheckpointException) as error:
        cause: BaseException = error
        if isinstance(error, CheckpointException):  # its message is a traceback of each rank
            cause = next(iter(error.failures.values()))[0]
            if not isinstance(cause, (OSError, SafetensorError)):
                raise cause from error
        said = f"{path}: expected a disk with room that can be written to"
        remedy = "free some space, or choose a different folder"
        raise WriteError(f"{said}, got {reason(cause)}; {remedy}") from error


def check_regular(path: Path) -> Path:
    """Return a path of a regular file, or of a file that does not exist.

    Refuse pipes, because reading a pipe could block forever.

    Raises:
        ValueError: the path exists and is not a regular file.
    """
    fits = path.is_file() or not path.exists()
    require(fits, str(path), "a regular file", "a folder, a pipe or a device")
    return path


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a regular file as hexadecimal digits."""
    with check_regular(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync(path: Path) -> None:
    """Flush a file to disk. If the path is a folder, flush its directory entries."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def plain_json(value: Any) -> Any:
    """Convert a value to JSON types: non-finite numbers to null, and 0-d tensors to numbers."""
    return to_jsonable_python(value, fallback=float, inf_nan_mode="null")


class JsonLines:
    """Writer of a JSON Lines file.

    Args:
        path: the file, which is created if it does not exist.
        length: number of bytes to keep if the file exists. All later bytes are removed.
    """

    def __init__(self, path: Path, length: int = 0) -> None:
        self.path = path
        self.length = length  # bytes of complete rows
        # In append mode, each write goes to the end of the file, even after a truncation. Without
        # a buffer, closing the file after an error does not write again.
        self._file = check_regular(path).open("ab", buffering=0)
        self._file.truncate(length)

    def append(self, rows: Iterable[Mapping[str, object]]) -> None:
        """Append one line for each row.

        Raises:
            WriteError: the disk is full. A resumed run removes the incomplete line.
        """
        text = "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows).encode()
        rest = memoryview(text)
        try:
            while rest:  # on a nearly full disk, a call may write only a part
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            said = f"{self.path}: expected room for a line, got {reason(error)}"
            raise WriteError(f"{said}; the lines before it are complete") from error
        self.length += len(text)

    def close(self) -> None:
        self._file.close()


# ----------------------------------------------------------------------------- Its checkpoints
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
        text = check_regular(checkpoint / MANIFEST).read_bytes()
        manifest = Manifest.model_validate_json(text)
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


def set_aside(checkpoint: Path) -> None:
    """Rename the folder of a damaged checkpoint, if it exists, so that no run uses it."""
    if checkpoint.exists():
        os.replace(checkpoint, f"{checkpoint}.damaged-{time.time_ns()}")


# ------------------------------------------------------------------------ The same run as before
def fingerprints(config: RunConfig) -> dict[str, str]:
    """Compute fingerprints of the custom rewards and models that a configuration names.

    Returns:
        The fingerprints by key. The key of a custom reward function is `rewards.LABEL`, and that of
        a folder in its option `path` is `rewards.LABEL.path`. The reference model has the key
        `reference`. If the policy starts from an adapter, the adapter has the key `adapter`, and
        its base model has the key `base`. The key `model` stands for the configuration and the
        tokenizer in the folders of the policy and of its base model.
    """
    from grpo_fast.train.models.loading import adapter_at

    prints = {}
    for spec in config.rewards:
        label = spec.label or spec.name.rpartition(":")[2]
        source = _source(spec.name)
        if source is not None:
            prints[f"rewards.{label}"] = _of_path(source)
        folder = os.path.expanduser(str(spec.options.get("path", "")))
        if os.path.isdir(folder):  # for example of a reward model; a file may be the reward's log
            prints[f"rewards.{label}.path"] = _of_path(folder)
    reference = config.reference
    model = config.model
    # A resumed run loads the following models from their files again, because a checkpoint does not
    # contain them. The files must be unchanged.
    base = None if model.path is None else adapter_at(model.path)
    folders = (model.path, base and base.base_model_name_or_path)  # may both have a tokenizer
    read = [_of_path(x, READ_AGAIN) for x in folders if x is not None and os.path.isdir(x)]
    if read:
        prints["model"] = ", ".join(read)
    if base is not None:
        prints["adapter"] = _of_path(str(model.path))
        prints["base"] = _of_path(base.base_model_name_or_path)
    is_loaded = model.lora or (reference.kind == "frozen" and not config.stores_reference)
    frozen = reference.path or (model.path if is_loaded else None)
    if frozen is not None:
        prints["reference"] = _of_path(frozen)
    return prints


def check_ranks(settings: dict[str, Any]) -> None:
    """Raise a ValueError if a rank's settings differ from rank 0's settings.

    The message lists the settings that differ on one rank.

    Args:
        settings: settings of this rank, including its fingerprints.
    """
    first, *others = ranks.gather(settings)
    for rank, own in enumerate(others, 1):
        changed = dict(differences(first, own))
        if changed:
            said = f"rank {rank}: expected the settings and files of rank 0, got others"
            raise ValueError("\n  ".join([said, *changed.values()]))


def check_same(was: dict[str, Any], now: dict[str, Any], allowed: Collection[str] = ()) -> None:
    """Raise a ValueError if a resumed run's settings or files differ from the original run's.

    The settings in FREE may differ, because they do not change the mathematics of a step.

    Args:
        was: settings of the original run, including its fingerprints.
        now: settings of the resumed run, including its fingerprints.
        allowed: kinds of files that may change, from the setting `resume_allow`.
    """
    free = tuple(f"{key}." for key in (*FREE, *(f"{FILES}.{kind}" for kind in allowed)))
    changed = dict(differences(was, now))
    refused = {key: line for key, line in changed.items() if not f"{key}.".startswith(free)}
    if refused:
        kinds = sorted({key.split(".")[1] for key in refused if key.startswith(f"{FILES}.")})
        hint = f" (resume_allow=[{','.join(kinds)}] accepts the files)" if kinds else ""
        said = "resume: expected the configuration and files that the run began with, got others"
        may = f"only these keys may change: {', '.join(FREE)}"
        raise ValueError("\n  ".join([said + hint, *refused.values(), may]))
    for key, line in changed.items():
        if key.startswith(FILES):
            log.warning("resume: %s", line)
        if key == "steps" and now["optim"]["schedule"] != "constant":
            log.warning("resume: %s changes the learning rates of the remaining steps", line)


def differences(was: Any, now: Any, above: str = "") -> Iterator[tuple[str, str]]:
    """Yield the dotted key of every setting that differs, and a line `key: old → new`.

    An integer equals a float of the same value, but a boolean never equals a number.
    """
    if isinstance(was, dict) and isinstance(now, dict):
        for key in [*was, *(key for key in now if key not in was)]:
            yield from differences(was.get(key), now.get(key), f"{above}{key}.")
    elif was != now or isinstance(was, bool) is not isinstance(now, bool):
        yield above[:-1], f"{above[:-1]}: {was!r} → {now!r}"


def _source(name: str) -> str | None:
    """Find the source file of a custom reward function. Return None for a built-in function."""
    module, _, _ = name.rpartition(":")
    if not module or module.endswith(".py"):
        return os.path.expanduser(module) or None
    spec = importlib.util.find_spec(module)
    return None if spec is None else spec.origin


def _of_path(path: str, patterns: tuple[str, ...] = WEIGHT_FILES) -> str:
    """Return a hash of a file or of a model's folder, or the commit of a model on the hub.

    Of a folder, the hash covers the files whose names match one of the patterns.
    """
    place = Path(path)
    if place.is_file():
        return f"sha256 {sha256_of(place)[:16]}"
    if place.is_dir():
        files = sorted({file for pattern in patterns for file in place.glob(pattern)})
        rows = [f"{file.name} {sha256_of(file)}" for file in files]
        return f"sha256 {hashlib.sha256(' '.join(rows).encode()).hexdigest()[:16]}"
    from transformers.utils import cached_file

    config = None
    with suppress(OSError):  # loading the model later raises a clearer error
        config = cached_file(path, "config.json", _raise_exceptions_for_missing_entries=False)
    return "unknown" if config is None else f"commit {Path(config).parent.name}"
