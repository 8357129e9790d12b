"""Tensors inside nested values: JSON holds their names, and a file beside it the tensors."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

from pydantic import PlainValidator, ValidationInfo
from torch import Tensor


def _named(name: Any, info: ValidationInfo) -> Any:
    if info.context is None:
        return name
    if not isinstance(name, str) or name not in info.context:
        raise ValueError(f"expected the name of a tensor that is there once, got {name!r:.100}")
    return info.context.pop(name)  # a second place would share its memory


# A tensor in a dataclass that is saved. It is read from the dict of tensors that is pydantic's
# `context`, and taken out of it; without a context its name stays.
Saved = Annotated[Tensor, PlainValidator(_named)]


def split_tensors(value: Any, tensors: dict[str, Tensor], name: str = "") -> Any:
    """Copy a nested value for JSON: each tensor goes to `tensors`, its name stands in its place."""
    if isinstance(value, Tensor):
        tensors[name] = value.detach().cpu().clone()  # views of one storage are written apart
        return name
    if dataclasses.is_dataclass(value):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {
            k: split_tensors(x, tensors, f"{name}/{k}" if name else k) for k, x in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [split_tensors(x, tensors, f"{name}/{i}") for i, x in enumerate(value)]
    return value
