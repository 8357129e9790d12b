"""Text of models, files and rewards is data: made safe to see, it gives a terminal no orders."""

from __future__ import annotations

import unicodedata

REASON = 400  # characters of another's message in a message of ours
_INVISIBLE = frozenset(("Cc", "Cf", "Cs", "Zl", "Zp"))


def escape_control(text: str) -> str:
    r"""Control, bidi and invisible characters become \x1b, \u202e …; \n and \t stay."""
    return "".join(
        c if c in "\n\t" or unicodedata.category(c) not in _INVISIBLE else _escaped(ord(c))
        for c in text
    )


def reason(error: BaseException) -> str:
    """An exception's message in one line of bounded length; its type, where that is no sentence.

    Torch's C++ frames are left out.
    """
    said = " ".join(str(error).partition("Exception raised from")[0].split())
    if not said or not isinstance(error, (ValueError, OSError)):
        said = f"{type(error).__name__}: {said}".removesuffix(": ")
    return said if len(said) <= REASON else f"{said[:REASON]}…"


def _escaped(code: int) -> str:
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
