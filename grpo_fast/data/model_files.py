"""Refuse a model's folder that asks for too much: it is data, also where somebody else made it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from grpo_fast.data.hub import is_offline

LAYERS = ("num_hidden_layers", "num_layers", "n_layers", "n_layer")  # the names of their number
MOST_LAYERS = 10_000


def check_fields(fields: dict[str, Any], allow_code: bool = False) -> None:
    """Raise a ValueError for what a model's config.json must not ask for, in its parts neither:
    layers that are never built to the end, and, unless code is allowed, a kernel from the hub.
    """
    for name, value in fields.items():
        if name in LAYERS and isinstance(value, int) and not 0 <= value <= MOST_LAYERS:
            raise ValueError(f"{name}: expected 0 to {MOST_LAYERS} layers, came {value}")
        if "_implementation" in name and "/" in str(value) and not allow_code:
            raise ValueError(f"{name}: expected one of transformers' own, came {value!r}")
        if isinstance(value, dict):
            check_fields(value, allow_code)


def read_fields(path: str, allow_code: bool = False) -> dict[str, Any]:
    """The fields of a model's config.json, as `check_fields` lets them pass.

    Raises transformers' own errors for a path that is no model's.
    """
    from transformers import PreTrainedConfig

    fields = PreTrainedConfig.get_config_dict(path)[0]
    check_fields(fields, allow_code)
    return fields


def check_files(path: str) -> None:
    """Raise a ValueError for a file in a model's folder that may have no end, as a pipe.

    Before a hub id is loaded: whether there is a hub.
    """
    if not Path(path).exists():
        is_offline()
    for file in Path(path).glob("*"):
        if file.exists() and not (file.is_file() or file.is_dir()):
            raise ValueError(f"model.path: expected regular files in {path}, came {file.name}")
