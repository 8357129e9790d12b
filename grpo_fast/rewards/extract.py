"""Reading the final number out of a completion: no eval, no float(), every step linear in length.

A number is `-?` digit, then digits and commas, then an optional decimal part: ASCII only, at most
32 digits. `$ % ** ,` and a trailing full stop are dropped before. Numbers are `Decimal`s:
18, 18.0, $18 and `18.` are one answer, 1,080 is 1080. The typographic minus (U+2212) and a decimal
part alone count in running text only: `#### −7` and `#### .7` are no strict answers, and -7 and 0.7
are the lenient ones.
"""

from __future__ import annotations

import re
from decimal import Decimal

from grpo_fast.data.files import MAX_DIGITS, NUMBER

# In running text a minus belongs to the number where nothing stands before it: "10-18" ends in 18.
_NUMBER_IN_TEXT = re.compile(
    r"(?:(?<![0-9A-Za-z).])-\$?)?(?:[0-9][0-9,]*(?:\.[0-9]+)?|(?<![0-9A-Za-z.])\.[0-9]+)"
)
_DECORATION = "$%*, \t\r\n"  # stripped at both ends only: 5*3 is not 53


def parse_number(text: str) -> Decimal | None:
    """Read a text that is one number, decorations aside; None for any other."""
    bare = text.strip(_DECORATION).removesuffix(".").rstrip(_DECORATION)
    if bare.startswith("-$"):
        bare = "-" + bare[2:]
    return _to_decimal(bare) if NUMBER.fullmatch(bare) else None


def marked_content(text: str) -> str | None:
    """The text behind the last `####` in its line or in the last `<answer>…</answer>`."""
    hashes = text.rfind("####")
    close = text.rfind("</answer>")
    open_ = text.rfind("<answer>", 0, close) if close >= 0 else -1
    if hashes < 0 and open_ < 0:
        return None
    if hashes > open_:
        return text[hashes + 4 :].lstrip(" \t").partition("\n")[0].partition("</answer>")[0]
    return text[open_ + len("<answer>") : close]


def extract_strict(text: str) -> Decimal | None:
    """The answer in the required format, `#### 18` or `<answer>18</answer>`; None without one."""
    content = marked_content(text)
    return None if content is None else parse_number(content)


def extract_lenient(text: str) -> Decimal | None:
    """The strict answer, else the first number behind the last marker, else the text's last."""
    strict = extract_strict(text)
    if strict is not None:
        return strict
    content = marked_content(text)
    marked = _numbers(content) if content is not None else []
    chosen = marked[:1] or _numbers(text)[-1:]
    return _to_decimal(chosen[0]) if chosen else None


def _numbers(text: str) -> list[str]:
    return _NUMBER_IN_TEXT.findall(text.replace("\u2212", "-"))


def _to_decimal(number: str) -> Decimal | None:
    digits = number.replace(",", "").replace("$", "")
    return Decimal(digits) if len(digits.lstrip("-").replace(".", "")) <= MAX_DIGITS else None
