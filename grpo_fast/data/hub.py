"""Checks before a model is loaded: whether the hub answers, what a folder must not ask for."""

from __future__ import annotations

import functools
import os
import socket
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

from grpo_fast.errors import require

SECONDS = 3.0
LOCAL = "the hub cannot be reached: say data=FILE or a folder, or model.path=FOLDER"
LAYERS = ("num_hidden_layers", "num_layers", "n_layers", "n_layer")  # the names of their number
MOST_LAYERS = 10_000


@functools.cache
def is_offline() -> bool:
    """Whether nothing of the hub answers. Asked once: its clients would retry for half a minute.

    Where nothing answers, the clients look into their cache alone from now on. A proxy is left to
    them.
    """
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return True
    if getproxies():
        return False
    place = urlsplit(constants.ENDPOINT)
    try:
        port = place.port or (80 if place.scheme == "http" else 443)
        socket.create_connection((place.hostname, port), timeout=SECONDS).close()
    except OSError:
        # For libraries that have read it already, too.
        os.environ["HF_HUB_OFFLINE"] = "1"
        constants.HF_HUB_OFFLINE = True
        if settings := sys.modules.get("datasets.config"):  # else not installed, or reads it later
            vars(settings).update(HF_HUB_OFFLINE=True, HF_DATASETS_OFFLINE=True)
        return True
    return False


def check_fields(fields: dict[str, Any], allow_code: bool = False) -> None:
    """Raise a ValueError for a model's config.json that asks for too many layers or, unless code is
    allowed, for a kernel from the hub. Nested fields are checked, too.
    """
    for name, value in fields.items():
        if name in LAYERS and isinstance(value, int):
            require(0 <= value <= MOST_LAYERS, name, f"0 to {MOST_LAYERS} layers", value)
        fits = allow_code or "_implementation" not in name or "/" not in str(value)
        require(fits, name, "one of transformers' own", repr(value))
        if isinstance(value, dict):
            check_fields(value, allow_code)


def read_fields(path: str, allow_code: bool = False) -> dict[str, Any]:
    """The fields of a model's config.json, checked; transformers' own errors for no model."""
    from transformers import PreTrainedConfig

    fields = PreTrainedConfig.get_config_dict(path)[0]
    check_fields(fields, allow_code)
    return fields


def check_files(path: str) -> None:
    """Raise a ValueError for a file in a model's folder that may have no end, as a pipe."""
    if not Path(path).exists():
        is_offline()
    for file in Path(path).glob("*"):
        fits = not file.exists() or file.is_file() or file.is_dir()
        require(fits, "model.path", f"regular files in {path}", file.name)
