"""All that a resumed run, and every rank of a run, must have as the run began: the configuration,
and fingerprints of the data, rewards and models that it only names.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from grpo_fast.data import hub
from grpo_fast.train.config import RunConfig
from grpo_fast.train.files import sha256_of
from grpo_fast.train.ranks import distributed

# How settings that may change begin.
FREE = ("output_dir.", "log.", "checkpoint.", "resume.", "resume_allow.", "rollout.vllm.",
        "distributed.", "distributed_replicas.", "distributed_timeout.")  # fmt: skip
WEIGHT_FILES = ("*.safetensors", "*.bin", "config.json")


def fingerprints(config: RunConfig) -> dict[str, str]:
    """Hashes of the files that a configuration only names, by `rewards.NAME` for a function of the
    user's own or a reward model, and by `reference`.
    """
    prints = {}
    for spec in config.rewards:
        label = spec.label or spec.name.rpartition(":")[2]
        source = spec.path if spec.path is not None else _source(spec.name)
        if source is not None:
            prints[f"rewards.{label}"] = _of_path(source)
    reference, model = config.reference, config.model
    # What no checkpoint holds is loaded again on resume.
    is_loaded = model.lora or (reference.kind == "frozen" and not config.stores_reference)
    frozen = reference.path or (model.path if is_loaded else None)
    if frozen is not None:
        prints["reference"] = _of_path(frozen)
    return prints


def check_ranks(settings: dict[str, Any], prints: dict[str, str]) -> None:
    """Raise a ValueError that names the rank and the keys where a rank differs from rank 0."""
    every = distributed.gather([settings, prints])
    lines = []
    for rank, (own, theirs) in enumerate(every):
        lines += [f"rank {rank}: {line}" for _, line in differences(every[0][0], own)]
        lines += [f"rank {rank}: {key} is another" for key in _changed(every[0][1], theirs)]
    if lines:
        raise ValueError("ranks: expected all to have what rank 0 has\n  " + "\n  ".join(lines))


def check_resumed(was: dict[str, str], now: dict[str, str], allowed: Sequence[str]) -> list[str]:
    """The names that have changed since a checkpoint; ValueError for those that may not."""
    changed = _changed(was, now)
    refused = [name for name in changed if name.partition(".")[0] not in allowed]
    if refused:
        kinds = sorted({name.partition(".")[0] for name in refused})
        lines = "".join(f"\n  {x}: {was.get(x, 'none')} → {now.get(x, 'none')}" for x in refused)
        raise ValueError(
            f"resume: expected the data, rewards and reference that the run began with, got "
            f"others (resume_allow=[{','.join(kinds)}] goes on all the same){lines}"
        )
    return changed


def check_same(was: dict[str, Any], now: dict[str, Any]) -> None:
    """Raise a ValueError that lists what a configuration changes in a run that has begun.

    The keys of FREE may change, and the steps grow where the learning rate does not follow them.
    """
    changed = {key: line for key, line in differences(was, now) if not f"{key}.".startswith(FREE)}
    steps = was.get("steps")
    if now["optim"]["schedule"] == "constant" and isinstance(steps, int) and now["steps"] > steps:
        changed.pop("steps", None)
    if changed:
        said = "resume: expected the configuration that the run began with, got another"
        raise ValueError("\n  ".join([said, *changed.values()]))


def differences(was: Any, now: Any, above: str = "") -> Iterator[tuple[str, str]]:
    """The dotted key, and `key: old → new`, of every setting in which two configurations differ."""
    if isinstance(was, dict) and isinstance(now, dict):
        for key in [*was, *(key for key in now if key not in was)]:
            yield from differences(was.get(key), now.get(key), f"{above}{key}.")
    elif was != now or type(was) is not type(now):
        yield above[:-1], f"{above[:-1]}: {was!r} → {now!r}"


def _changed(was: dict[str, str], now: dict[str, str]) -> list[str]:
    return sorted(name for name in was.keys() | now.keys() if was.get(name) != now.get(name))


def _source(name: str) -> str | None:
    """The file of a reward function of the user's own; None for one of this package."""
    module, _, _ = name.rpartition(":")
    if not module or module.endswith(".py"):
        return os.path.expanduser(module) or None
    spec = importlib.util.find_spec(module)
    return None if spec is None else spec.origin


def _of_path(path: str) -> str:
    """Identify a file or a model's folder by a hash, a hub id by its commit."""
    place = Path(path)
    if place.is_file():
        return f"sha256 {sha256_of(place.resolve())[1][:16]}"
    if not place.is_dir():
        from transformers.utils import cached_file

        hub.is_offline()  # its client would try six times, and print each
        with contextlib.suppress(OSError):  # none there: loading it says so, by its setting's name
            config = cached_file(path, "config.json", _raise_exceptions_for_missing_entries=False)
            return "unknown" if config is None else f"commit {Path(config).parent.name}"
        return "unknown"
    files = sorted({file for pattern in WEIGHT_FILES for file in place.glob(pattern)})
    rows = [(file.name, *sha256_of(file.resolve())) for file in files]
    return f"sha256 {hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:16]}"
