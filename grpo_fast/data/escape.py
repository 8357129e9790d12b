"""Escaping of untrusted text, which could otherwise send control sequences to a terminal."""

from __future__ import annotations

import unicodedata

REASON = 400  # largest number of characters that a message quotes from an exception's text
_INVISIBLE = frozenset(("Cc", "Cf", "Cs", "Zl", "Zp"))


def escape_control(text: str) -> str:
    r"""Return text with its control, bidi and invisible characters written as escapes.

    For example, the ESC character becomes the four characters `\x1b`. Line ends and tabs are kept.
    """
    hidden = {c for c in text if c not in "\n\t" and unicodedata.category(c) in _INVISIBLE}
    return "".join(c.encode("unicode_escape").decode() if c in hidden else c for c in text)


def reason(error: BaseException) -> str:
    """Return the message of an exception in one line of limited length, without C++ stack frames.

    The name of the exception's class comes first, except for a ValueError or OSError.
    """
    text = " ".join(str(error).partition("Exception raised from")[0].split())
    if not text or not isinstance(error, (ValueError, OSError)):
        text = f"{type(error).__name__}: {text}".removesuffix(": ")
    return text if len(text) <= REASON else f"{text[:REASON]}…"
