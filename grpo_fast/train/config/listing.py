"""Output of `grpo-fast config`, which lists each key with its type, default and description."""

from __future__ import annotations

import json
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from grpo_fast.train.config.base import members
from grpo_fast.train.config.words import fields_of, nearest, section_of

WORDS = {str: "text", int: "integer", float: "number", bool: "true | false", NoneType: "null",
         dict: "mapping"}  # fmt: skip


def listed_keys(kind: type[BaseModel], prefix: str = "") -> list[str]:
    """Return two lines per configuration key: `key: type = default`, and the description.

    Args:
        kind: class of the configuration.
        prefix: a section such as `optim`, or a single key. The empty string selects all keys.

    Raises:
        ValueError: no key or section has the name `prefix`.
    """
    fields = dict(fields_of(kind))
    lines = []
    for key, field in fields.items():
        if not prefix or key == prefix or key.startswith(f"{prefix}."):
            lines.append(f"{key}: {_type_words(field.annotation)}{_default(field)}")
            lines.append(f"    {field.description}")
    if not lines:
        hint = nearest(prefix, list(kind.model_fields), list(fields))
        raise ValueError(f"config: no key or section {prefix!r}{hint}")
    return lines


def _type_words(annotation: Any) -> str:
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return " | ".join("null" if x is None else str(x).lower() for x in inner)
    if origin is list:
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
    return " (required)" if default is PydanticUndefined else f" = {json.dumps(default)}"
