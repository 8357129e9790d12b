"""Escape the text of models, files and rewards before it is shown: a terminal obeys some of it."""

from __future__ import annotations

import unicodedata

REASON = 400  # characters of another's message in a message of ours
_INVISIBLE = frozenset(("Cc", "Cf", "Cs", "Zl", "Zp"))


def escape_control(text: str) -> str:
    r"""Control, bidi and invisible characters become \x1b, \u202e …; \n and \t stay."""
    hidden = {c for c in text if c not in "\n\t" and unicodedata.category(c) in _INVISIBLE}
    return "".join(c.encode("unicode_escape").decode() if c in hidden else c for c in text)


def reason(error: BaseException) -> str:
    """An exception's message in one line of bounded length; with its type where it needs one.

    Torch's C++ frames are left out.
    """
    said = " ".join(str(error).partition("Exception raised from")[0].split())
    if not said or not isinstance(error, (ValueError, OSError)):
        said = f"{type(error).__name__}: {said}".removesuffix(": ")
    return said if len(said) <= REASON else f"{said[:REASON]}…"
