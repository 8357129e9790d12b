"""Checks that settings and files are equal on all ranks, and unchanged in a resumed run."""

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

FILES = "files"  # key under which the fingerprints are stored next to the settings
# Prefixes of the settings that may change when a run is resumed.
FREE = ("output_dir.", "log.", "checkpoint.", "resume.", "resume_allow.", "rollout.vllm.",
        "distributed.", "distributed_replicas.", "distributed_timeout.")  # fmt: skip
WEIGHT_FILES = ("*.safetensors", "*.bin", "config.json", "adapter_config.json")
# Files of the policy that a resumed run reads again. They set the architecture and the prompts.
READ_AGAIN = ("config.json", "generation_config.json", "*token*.json", "tokenizer.model", "vocab.*",
              "merges.txt", "chat_template.*")  # fmt: skip


def fingerprints(config: RunConfig) -> dict[str, str]:
    """Compute fingerprints of the custom rewards and models that a configuration names.

    Returns:
        The fingerprints by key. The key of a custom reward function or a reward model is
        `rewards.LABEL`. The reference model has the key `reference`. If the policy starts from an
        adapter, the adapter has the key `adapter`, and its base model has the key `base`. The key
        `model` stands for the configuration and the tokenizer in the folders of the policy and of
        its base model.
    """
    prints = {}
    for spec in config.rewards:
        label = spec.label or spec.name.rpartition(":")[2]
        source = spec.path if spec.path is not None else _source(spec.name)
        if source is not None:
            prints[f"rewards.{label}"] = _of_path(source)
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

    All ranks must call this. The message lists the settings that differ on one rank.

    Args:
        settings: settings of this rank, including its fingerprints.
    """
    first, *others = distributed.gather(settings)
    for rank, own in enumerate(others, 1):
        changed = dict(differences(first, own))
        if changed:
            said = f"rank {rank}: expected the settings and files of rank 0, got others"
            raise ValueError("\n  ".join([said, *changed.values()]))


def check_same(was: dict[str, Any], now: dict[str, Any], allowed: Collection[str] = ()) -> None:
    """Raise a ValueError if a resumed run's settings or files differ from the original run's.

    The settings in FREE may differ. With a constant learning rate, the number of steps may be
    larger.

    Args:
        was: settings of the original run, including its fingerprints.
        now: settings of the resumed run, including its fingerprints.
        allowed: kinds of files that may change, from the setting `resume_allow`.
    """
    if "model" not in was.get(FILES, {}):  # an older version wrote the checkpoint
        allowed = [*allowed, "model"]
    free = (*FREE, *(f"{FILES}.{kind}." for kind in allowed))
    if now["optim"]["schedule"] == "constant" and now["steps"] > was["steps"]:
        free += ("steps.",)
    changed = dict(differences(was, now))
    refused = {key: line for key, line in changed.items() if not f"{key}.".startswith(free)}
    for key, line in changed.items():
        if key.startswith(FILES) and key not in refused:
            log.warning("resume: %s", line)
    if refused:
        kinds = sorted({key.split(".")[1] for key in refused if key.startswith(f"{FILES}.")})
        hint = f" (resume_allow=[{','.join(kinds)}] accepts the files)" if kinds else ""
        said = "resume: expected the configuration and files that the run began with, got others"
        raise ValueError("\n  ".join([said + hint, *refused.values()]))


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

    hub.is_offline()  # if so, this call makes the hub's client skip its six retries
    config = None
    with contextlib.suppress(OSError):  # loading the model later raises a clearer error
        config = cached_file(path, "config.json", _raise_exceptions_for_missing_entries=False)
    return "unknown" if config is None else f"commit {Path(config).parent.name}"
