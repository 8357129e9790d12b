"""Checks that settings and files are the same on all ranks, and the same when a run resumes."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import logging
import os
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from grpo_fast.data import hub
from grpo_fast.train.config import RunConfig
from grpo_fast.train.files import sha256_of
from grpo_fast.train.models.adapters import adapter_at
from grpo_fast.train.ranks import distributed

log = logging.getLogger(__name__)

FILES = "files"  # key of the fingerprints in the stored settings
# Prefixes of the settings that may change when a run resumes.
FREE = ("output_dir.", "log.", "checkpoint.", "resume.", "resume_allow.", "rollout.vllm.",
        "distributed.", "distributed_replicas.", "distributed_timeout.")  # fmt: skip
WEIGHT_FILES = ("*.safetensors", "*.bin", "config.json", "adapter_config.json")


def fingerprints(config: RunConfig) -> dict[str, str]:
    """Return a hash of each file that a configuration names but does not contain.

    The keys are `rewards.NAME` for custom functions and reward models, and `reference`. A policy
    that starts from an adapter adds the keys `adapter` and `base`.
    """
    prints = {}
    for spec in config.rewards:
        label = spec.label or spec.name.rpartition(":")[2]
        source = spec.path if spec.path is not None else _source(spec.name)
        if source is not None:
            prints[f"rewards.{label}"] = _of_path(source)
    reference = config.reference
    model = config.model
    # Checkpoints do not contain these models, so they are loaded again when a run resumes.
    base = None if model.path is None else adapter_at(model.path)
    if base is not None:
        prints["adapter"] = _of_path(str(model.path))
        prints["base"] = _of_path(base.base_model_name_or_path)
    is_loaded = model.lora or (reference.kind == "frozen" and not config.stores_reference)
    frozen = reference.path or (model.path if is_loaded else None)
    if frozen is not None:
        prints["reference"] = _of_path(frozen)
    return prints


def check_ranks(settings: dict[str, Any]) -> None:
    """Raise a ValueError if the settings of a rank differ from those of rank 0. Collective call.

    The message names the ranks and the settings that differ.
    """
    first, *others = distributed.gather(settings)
    lines = [
        f"rank {rank}: {line}"
        for rank, own in enumerate(others, 1)
        for _, line in differences(first, own)
    ]
    if lines:
        said = "ranks: expected the settings and files of rank 0 on all, got others"
        raise ValueError("\n  ".join([said, *lines]))


def check_same(was: dict[str, Any], now: dict[str, Any], allowed: Collection[str] = ()) -> None:
    """Raise a ValueError that lists the settings and files that changed since a run began.

    Settings in FREE may change. The number of steps may increase if the learning rate is constant.

    Args:
        was: settings of the run when it began, including its fingerprints.
        now: settings of the run that resumes, including its fingerprints.
        allowed: kinds of files that may change, as listed in `resume_allow`.
    """
    changed = {key: line for key, line in differences(was, now) if not f"{key}.".startswith(FREE)}
    is_constant = now["optim"]["schedule"] == "constant"
    if is_constant and "steps" in changed and now["steps"] > was["steps"]:
        changed.pop("steps")
    kinds = {key: f"{key}.".split(".")[1] for key in changed if key.startswith(FILES)}
    for key, kind in kinds.items():
        if kind in allowed:
            log.warning("resume: %s", changed.pop(key))
    if changed:
        refused = sorted(set(kinds.values()) - set(allowed))
        hint = f" (resume_allow=[{','.join(refused)}] accepts the files)" if refused else ""
        said = "resume: expected the configuration and files that the run began with, got others"
        raise ValueError("\n  ".join([said + hint, *changed.values()]))


def differences(was: Any, now: Any, above: str = "") -> Iterator[tuple[str, str]]:
    """Yield the dotted key of every setting that differs, with the text `key: old → new`."""
    if isinstance(was, dict) and isinstance(now, dict):
        for key in [*was, *(key for key in now if key not in was)]:
            yield from differences(was.get(key), now.get(key), f"{above}{key}.")
    elif was != now or type(was) is not type(now):
        yield above[:-1], f"{above[:-1]}: {was!r} → {now!r}"


def _source(name: str) -> str | None:
    """Return the source file of a custom reward function, or None for a built-in function."""
    module, _, _ = name.rpartition(":")
    if not module or module.endswith(".py"):
        return os.path.expanduser(module) or None
    spec = importlib.util.find_spec(module)
    return None if spec is None else spec.origin


def _of_path(path: str) -> str:
    """Return a hash of a file or of a model's folder. For a hub id, return the commit."""
    place = Path(path)
    if place.is_file():
        return f"sha256 {sha256_of(place)[:16]}"
    if place.is_dir():
        files = sorted({file for pattern in WEIGHT_FILES for file in place.glob(pattern)})
        rows = [f"{file.name} {sha256_of(file)}" for file in files]
        return f"sha256 {hashlib.sha256(' '.join(rows).encode()).hexdigest()[:16]}"
    from transformers.utils import cached_file

    hub.is_offline()  # avoids six retries of the hub's client when offline
    config = None
    with contextlib.suppress(OSError):  # loading the model raises a better error
        config = cached_file(path, "config.json", _raise_exceptions_for_missing_entries=False)
    return "unknown" if config is None else f"commit {Path(config).parent.name}"
