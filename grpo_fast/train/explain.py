"""What was refused, in one readable line: the key, the nearest known one, what came, the reason."""

from __future__ import annotations

import difflib
from typing import Any

from pydantic import BaseModel

QUOTED, REASON = 200, 400  # characters of a value, and of another's message, in a message of ours

# Other trainers' names whose letters lead elsewhere (learning_rate is most like weight_decay).
ELSEWHERE = {"learning_rate": "lr", "num_generations": "group_size"}


def explain(error: Any, root: type[BaseModel]) -> str:
    """One indented line for one of a ValidationError's errors; `root` is the model that was validated."""
    path = [p for p in error["loc"] if not (isinstance(p, str) and p.endswith("Config]"))]
    where = ".".join(str(p) for p in path)
    if error["type"] == "extra_forbidden":
        return f"  {where}: unknown key" + nearest(str(path[-1]), _known_keys(root, path[:-1]))
    message = error["msg"].removeprefix("Value error, ")
    if error["type"] == "missing":
        return f"  {where}: is missing"
    is_section = isinstance(error["input"], (dict, BaseModel))
    came = "" if is_section else f", came {quoted(error['input'])}"
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


def quoted(value: Any) -> str:
    """A value as a message shows it, however long it is."""
    text = repr(value)
    return text if len(text) <= QUOTED else f"{text[:QUOTED]}… ({len(text)} characters)"


def reason(error: BaseException) -> str:
    """What an exception says, in one line of bounded length."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= REASON else f"{text[:REASON]}…"


def nearest(key: str, known: list[str]) -> str:
    """The end of a refusal: the name most like `key`, or all of them."""
    if ELSEWHERE.get(key) in known:
        return f"; nearest: {ELSEWHERE[key]}"
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.4)
    return f"; nearest: {close[0]}" if close else f"; known: {', '.join(known)}"
