r"""Extract answers from text, without eval and in time linear in its length.

Text marks its answer by `#### 18` (to the end of the line), `<answer>18</answer>` or
`\boxed{18}`. If there are several marked answers, the last one counts. Text inside
`<think>…</think>` is ignored, and so is text after a `<think>` that is never closed.

A number has at most 32 ASCII digits, with or without commas between groups of three. It may have a
sign, decimals, an exponent or a denominator. Currency signs, `%` and `*` at both ends, a colon or
`=` in front, and a full stop at the end are ignored. For example, 18, 18.0, $18, +18 and `18.` are
equal, as are 1,080 and 1080, and 1/2 and 0.5. The minus sign may be `-`, U+2212, an en dash or a
full-width minus.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from decimal import Decimal
from fractions import Fraction

HASHES = "####"
TAG = "<answer>"
BOXED = "\\boxed"
MARKS = (HASHES, TAG, BOXED)
USUAL_MARKS = (HASHES, TAG)  # for GSM8K, whose prompts may request either mark
MAX_DIGITS = 32  # most digits of a number

Number = Decimal | Fraction

_MINUS = str.maketrans(dict.fromkeys("\u2212\u2013\uff0d", "-"))
_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)"
_POWER = r"(?:[eE][-+]?[0-9]{1,2}(?![0-9A-Za-z.]))?"
_NUMBER = re.compile(
    rf"([-+]?)(?:({_DIGITS})/({_DIGITS})|((?:{_DIGITS}(?:\.[0-9]+)?|\.[0-9]+){_POWER}))"
)
# A minus sign directly after a word or number is not part of the next number. The last number of
# "10-18" is therefore 18 and not -18.
_NUMBER_IN_TEXT = re.compile(
    rf"(?:(?<![0-9A-Za-z).])-[$€£¥]?)?"
    rf"(?:{_DIGITS}/[1-9][0-9]*|{_DIGITS}(?:\.[0-9]+)?{_POWER}|(?<![0-9A-Za-z.])\.[0-9]+{_POWER})"
)
_ENDS = "$€£¥%°*,:= \t\r\n\u00a0\u202f"  # removed only at the ends, because 5*3 must not become 53
_FRACTION = re.compile(r"([-+]?)\\[dt]?frac(?:\{([^{}]*)\}\{([^{}]*)\}|([0-9])([0-9]))")
_LATEX = (("{,}", ","), (r"\left", ""), (r"\right", ""), (r"^\circ", ""), (r"^{\circ}", ""),
          (r"\(", ""), (r"\)", ""), (r"\[", ""), (r"\]", ""), (r"\$", "$"), (r"\%", "%"),
          )  # fmt: skip
_WRAPPER = re.compile(r"\\(?:boxed|fbox|text|mathrm)\s*\{(.*)\}", re.S)
_OPEN_TAG = re.compile("<answer>", re.I)
_CLOSE_TAG = re.compile("</answer>", re.I)
_BRACE = re.compile(r"\\(?:boxed|fbox)\s*\{|[{}]")


def parse_number(text: str) -> Number | None:
    """Parse text that consists of a single number. Return None for any other text.

    Currency signs, LaTeX and similar decorations of the number are ignored.
    """
    # 1. Remove LaTeX, currency signs, and one wrapper such as \boxed{…}.
    bare = text.translate(_MINUS)
    for latex, plain in _LATEX:
        bare = bare.replace(latex, plain)
    bare = bare.strip(_ENDS).removesuffix(".").rstrip(_ENDS)
    bare = unwrapped(bare).strip(_ENDS)
    # 2. Rewrite \frac{1}{2} as 1/2, and "- 5" as "-5".
    if fraction := _FRACTION.fullmatch(bare):
        bare = "{}{}/{}".format(*(part for part in fraction.groups() if part is not None))
    if bare[:1] in ("-", "+"):
        bare = bare[0] + bare[1:].lstrip(_ENDS)
    return _to_number(bare)


def unwrapped(text: str) -> str:
    r"""Return the content of `\boxed{…}` or `\text{…}`, or the text itself if it has no wrapper."""
    found = _WRAPPER.fullmatch(text)
    return text if found is None else found[1]


def final_part(text: str) -> str:
    """Return the text after the last `</think>`, up to a `<think>` that is never closed."""
    end = text.rfind("</think>")
    if (start := text.rfind("<think>")) > end:
        text = text[:start]
    return text[end + len("</think>") :] if end >= 0 else text


def marked_content(text: str, marks: Collection[str] = MARKS) -> str | None:
    """Return the answer at the last answer mark in the text, or None if it has no answer mark.

    An answer mark is `####`, `<answer>` or a LaTeX box.

    Args:
        text: the text.
        marks: the kinds of marks to look for, a subset of MARKS.
    """
    found: list[tuple[int, str]] = []
    if HASHES in marks and (place := text.rfind(HASHES)) >= 0:
        line = text[place + len(HASHES) :].lstrip(" \t\u00a0").partition("\n")[0]
        found.append((place, _CLOSE_TAG.split(line, maxsplit=1)[0]))
    if TAG in marks:
        close = max((tag.start() for tag in _CLOSE_TAG.finditer(text)), default=0)
        place = max((tag.start() for tag in _OPEN_TAG.finditer(text, 0, close)), default=-1)
        if place >= 0:
            found.append((place, text[place + len(TAG) : close]))
    if BOXED in marks and (boxed := _last_box(text)) is not None:
        found.append(boxed)
    return max(found)[1] if found else None


def extract_strict(text: str, marks: Collection[str] = USUAL_MARKS) -> Number | None:
    """Return the number that the text marks as its answer in the required format, or None.

    Args:
        text: a completion.
        marks: the answer marks that the format allows. If `marks` is empty, the full text after
            the thought must be a number.
    """
    final = final_part(text)
    content = marked_content(final, marks) if marks else final
    return None if content is None else parse_number(content)


def extract_lenient(text: str) -> Number | None:
    """Return the number at the last answer mark. Without marks, return the last number."""
    final = final_part(text)
    content = marked_content(final)
    if content is not None:
        if (whole := parse_number(content)) is not None:
            return whole
        first = _NUMBER_IN_TEXT.match(content.translate(_MINUS).lstrip(_ENDS))
        if first is not None:
            return _to_number(first[0])
    numbers = _NUMBER_IN_TEXT.findall(final.translate(_MINUS))
    return _to_number(numbers[-1]) if numbers else None


def _last_box(text: str) -> tuple[int, str] | None:
    r"""Return the position and content of the last \boxed{…} with balanced braces, or None."""
    if "\\boxed" not in text and "\\fbox" not in text:
        return None
    opened: list[int] = []  # start of each open box, and -1 for each other open brace
    last = None
    for brace in _BRACE.finditer(text):
        if brace[0] != "}":
            opened.append(-1 if brace[0] == "{" else brace.start())
        elif opened and (place := opened.pop()) >= 0:
            last = place, brace.start()
    return last and (last[0], text[text.index("{", last[0]) + 1 : last[1]])


def _to_number(text: str) -> Number | None:
    text = "".join(c for c in text if c not in "$€£¥")
    parts = _NUMBER.fullmatch(text)
    if parts is None or sum(c.isdigit() for c in text) > MAX_DIGITS:
        return None
    sign, above, below, plain = (part and part.replace(",", "") for part in parts.groups())
    if plain is not None:
        return Decimal(sign + plain)
    return Fraction(int(sign + above), int(below)) if int(below) else None
