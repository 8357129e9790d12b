"""Refuse a model's folder that asks for too much: it is data, also where somebody else made it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from grpo_fast.data.hub import is_offline
from grpo_fast.errors import require

LAYERS = ("num_hidden_layers", "num_layers", "n_layers", "n_layer")  # the names of their number
MOST_LAYERS = 10_000


def check_fields(fields: dict[str, Any], allow_code: bool = False) -> None:
    """Raise a ValueError for what a model's config.json must not ask for, in its parts neither:
    layers that are never built to the end, and, unless code is allowed, a kernel from the hub.
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
