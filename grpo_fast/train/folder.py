"""The folder of a run: its lock, files, logs and checkpoints, and checks of a resumed run.

A resumed run must have the settings, data, code and models with which the run began.
"""

from __future__ import annotations

import hashlib
import importlib.util
import itertools
import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from pydantic_core import to_jsonable_python

from grpo_fast.errors import WriteError, reason, require
from grpo_fast.train import ranks
from grpo_fast.train.config import RunConfig

log = logging.getLogger(__name__)

LOCK = ".lock"
FOLDER = "checkpoints"
STEP = "step_"  # prefix of the name of a checkpoint's folder
NAME = re.compile(rf"{STEP}\d{{6,12}}")
CONFIG = "config.yaml"  # the saved configuration
IGNORED = {LOCK, f"{CONFIG}.tmp"}  # a run that failed at its start can leave these files
FILES = "files"  # key under which the fingerprints are stored next to the settings
# Prefixes of the settings that may change when a run is resumed.
FREE = ("steps", "tokens_per_microbatch", "eval", "log", "checkpoint", "output_dir", "rollout.vllm",
        "resume", "distributed", "distributed_replicas", "distributed_timeout")  # fmt: skip
WEIGHT_FILES = ("*.safetensors", "*.bin", "config.json")
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


# ----------------------------------------------------------------------------- Its checkpoints
def step_of(checkpoint: Path) -> int:
    """Return the step number from a folder name such as step_000010."""
    return int(checkpoint.name.removeprefix(STEP))


def checkpoints_in(run: str | Path) -> list[Path]:
    """Return all checkpoints in a run's folder, from newest to oldest."""
    root = Path(run) / FOLDER
    found = [path for path in root.iterdir() if NAME.fullmatch(path.name)] if root.is_dir() else []
    return sorted(found, key=step_of, reverse=True)


# ------------------------------------------------------------------------ The same run as before
def fingerprints(config: RunConfig) -> dict[str, str]:
    """Compute fingerprints of the custom rewards and models that a configuration names.

    Returns:
        The fingerprints by key. The key of a custom reward function is `rewards.LABEL`, and that of
        a folder in its option `path` is `rewards.LABEL.path`. The key `model` stands for the
        policy's configuration and tokenizer, and for its weights if checkpoints do not contain all
        of them.
    """
    prints = {}
    for spec in config.rewards:
        label = spec.label or spec.name.rpartition(":")[2]
        source = _source(spec.name)
        if source is not None:
            prints[f"rewards.{label}"] = _of_path(source)
        folder = os.path.expanduser(str(spec.options.get("path", "")))
        if os.path.isdir(folder):  # for example of a reward model; a file may be the reward's log
            prints[f"rewards.{label}.path"] = _of_path(folder)
    model = config.model
    if model.path is not None:
        is_copied = config.reference.kind == "frozen" and not config.stores_reference
        patterns = (*READ_AGAIN, *WEIGHT_FILES) if model.lora or is_copied else READ_AGAIN
        prints["model"] = _of_path(model.path, patterns)
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


def check_same(was: dict[str, Any], now: dict[str, Any]) -> None:
    """Raise a ValueError if a resumed run's settings or files differ from the original run's.

    The settings in FREE may differ, because they do not change the mathematics of a step.

    Args:
        was: settings of the original run, including its fingerprints.
        now: settings of the resumed run, including its fingerprints.
    """
    free = tuple(f"{key}." for key in FREE)
    changed = dict(differences(was, now))
    refused = {key: line for key, line in changed.items() if not f"{key}.".startswith(free)}
    if refused:
        said = "resume: expected the configuration and files that the run began with, got others"
        lines = [said, *refused.values(), f"only these keys may change: {', '.join(FREE)}"]
        if any(key.startswith(f"{FILES}.") for key in refused):
            export = "the model that `grpo-fast export` writes"
            lines.append(f"for other files, start a new run from {export}")
        raise ValueError("\n  ".join(lines))
    if "steps" in changed and now["optim"]["schedule"] != "constant":
        said = "resume: %s changes the learning rates of the remaining steps"
        log.warning(said, changed["steps"])


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
    if place.exists():
        files = [place]
        if place.is_dir():
            files = sorted({file for pattern in patterns for file in place.glob(pattern)})
        found = hashlib.sha256()
        for file in files:
            found.update(file.name.encode())
            with check_regular(file).open("rb") as content:
                found.update(hashlib.file_digest(content, "sha256").digest())
        return f"sha256 {found.hexdigest()[:16]}"
    from transformers.utils import cached_file

    config = None
    with suppress(OSError):  # loading the model later raises a clearer error
        config = cached_file(path, "config.json", _raise_exceptions_for_missing_entries=False)
    return "unknown" if config is None else f"commit {Path(config).parent.name}"
