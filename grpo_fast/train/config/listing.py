"""The keys of a configuration as lines: `grpo-fast config`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from grpo_fast.train.config.base import members
from grpo_fast.train.config.words import dotted_keys, nearest, section_of

WORDS = {str: "text", int: "integer", float: "number", bool: "true | false", NoneType: "null",
         dict: "mapping"}  # fmt: skip


def listed_keys(kind: type[BaseModel], prefix: str = "") -> list[str]:
    """Return two lines for each key: `key: type = default`, and what the key means.

    Args:
        kind: the configuration.
        prefix: a section such as `optim`, or one key; empty for all keys.

    Raises:
        ValueError: no key is called `prefix` or is below it.
    """
    lines = []
    for key, field in _fields(kind):
        if not prefix or key == prefix or key.startswith(f"{prefix}."):
            lines.append(f"{key}: {_type_words(field.annotation)}{_default(field)}")
            lines.append(f"    {field.description or ''}".rstrip())
    if not lines:
        keys = list(dotted_keys(kind))
        top = list(kind.model_fields)
        raise ValueError(f"config: no key or section {prefix!r}{nearest(prefix, top, keys)}")
    return lines


def _fields(kind: type[BaseModel], above: str = "") -> Iterator[tuple[str, FieldInfo]]:
    for name, field in kind.model_fields.items():
        yield above + name, field
        section = section_of(field.annotation)
        if section is not None:
            first = "0." if get_origin(field.annotation) is list else ""
            yield from _fields(section, f"{above}{name}.{first}")


def _type_words(annotation: Any) -> str:
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return " | ".join("null" if word is None else str(word) for word in inner)
    if origin in (list, tuple):
        return f"list of {_type_words(inner[0])}"
    if section_of(annotation) is not None:
        return "section | null" if NoneType in members(annotation) else "section"
    if inner and origin is not dict:  # a union, or Annotated
        parts = [part for part in inner if isinstance(part, type) or get_origin(part)]
        return " | ".join(dict.fromkeys(map(_type_words, parts)))
    return WORDS.get(origin or annotation, "value")


def _default(field: FieldInfo) -> str:
    if section_of(field.annotation) is not None and field.default is not None:
        return ""
    default = field.get_default(call_default_factory=True)
    if default is PydanticUndefined:
        return " (required)"
    return f" = {json.dumps(default)}"
