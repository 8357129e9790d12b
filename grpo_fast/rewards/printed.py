"""What reward functions print is mostly model text: data, not orders to the terminal."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable
from typing import Any

_INVISIBLE = frozenset(("Cc", "Cf", "Cs", "Zl", "Zp"))


def escape_control(text: str) -> str:
    r"""Control, bidi and invisible characters become \x1b, \u202e …; \n and \t stay."""
    return "".join(_escaped(c) if _orders(c) else c for c in text)


def _orders(character: str) -> bool:
    return character not in "\n\t" and unicodedata.category(character) in _INVISIBLE


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")


class EscapedStream:
    """A text stream that escapes what is written; everything else is the stream's own."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        self._stream.write(escape_control(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
