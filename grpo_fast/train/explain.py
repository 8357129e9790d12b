"""What pydantic refuses, in one readable line: the key, the nearest known one, the value that came."""

from __future__ import annotations

import difflib
from typing import Any

from pydantic import BaseModel


def explain(error: Any, root: type[BaseModel]) -> str:
    """One indented line for one of a ValidationError's errors; `root` is the model that was validated."""
    path = [p for p in error["loc"] if not (isinstance(p, str) and p.endswith("Config]"))]
    where = ".".join(str(p) for p in path)
    if error["type"] == "extra_forbidden":
        return f"  {where}: unknown key" + nearest(str(path[-1]), _known_keys(root, path[:-1]))
    message = error["msg"].removeprefix("Value error, ")
    if error["type"] == "missing":
        return f"  {where}: is missing"
    came = "" if isinstance(error["input"], (dict, BaseModel)) else f", came {error['input']!r}"
    return f"  {where}: {message}{came}" if where else f"  {message}"


def _known_keys(root: type[BaseModel], path: list[Any]) -> list[str]:
    section: Any = root
    for part in path:
        if isinstance(part, int):
            continue
        section = _section_of(section.model_fields[part].annotation)
    return list(section.model_fields)


def _section_of(annotation: Any) -> Any:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(filter(None, map(_section_of, getattr(annotation, "__args__", ()))), None)


def nearest(key: str, known: list[str]) -> str:
    """The end of a refusal: the name most like `key`, or all of them."""
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.4)
    return f"; nearest: {close[0]}" if close else f"; known: {', '.join(known)}"
