"""Checks that a model's files are safe to load."""

from __future__ import annotations

from collections.abc import Mapping

from grpo_fast.errors import require

# Names that architectures use in config.json for the number of layers.
LAYERS = ("num_hidden_layers", "num_layers", "n_layers", "n_layer")
MOST_LAYERS = 10_000


def check_fields(fields: Mapping[str, object], allow_code: bool = False) -> None:
    """Check the fields of a model's config.json, including nested ones.

    Args:
        fields: the fields.
        allow_code: if True, allow attention kernels from the hub, which execute code.

    Raises:
        ValueError: the model has so many layers that they would fill the memory, or a field names a
            kernel from the hub.
    """
    for name, value in fields.items():
        if name in LAYERS and isinstance(value, int):
            require(0 <= value <= MOST_LAYERS, name, f"0 to {MOST_LAYERS} layers", value)
        fits = allow_code or "_implementation" not in name or "/" not in str(value)
        require(fits, name, "one of transformers' implementations", repr(value))
        if isinstance(value, dict):
            check_fields(value, allow_code)


def read_fields(path: str, allow_code: bool = False) -> dict[str, object]:
    """Return the checked fields of a model's config.json. See `check_fields`.

    Raises:
        ValueError: a field is not allowed.
        OSError: transformers finds no model at the path.
    """
    from transformers import PreTrainedConfig

    fields = PreTrainedConfig.get_config_dict(path)[0]
    check_fields(fields, allow_code)
    return fields
