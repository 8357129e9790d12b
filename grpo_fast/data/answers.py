r"""Find answers in text and read numbers, without eval and in time linear in the text's length.

Text marks its answer by `#### 18` (to the end of the line), `<answer>18</answer>` or
`\boxed{18}`. If there are several marked answers, the last one counts. Text inside
`<think>…</think>` is ignored, and so is text after a `<think>` that is never closed. The tags
`<thinking>`, `<thought>` and `<reasoning>` mean the same.

A number has at most 32 ASCII digits, with or without commas between groups of three. It may have a
sign, decimals, an exponent or a denominator. Currency signs, `%` and `*` at both ends, a colon or
`=` in front, and a full stop at the end are ignored. For example, 18, 18.0, $18, +18 and `18.` are
equal, as are 1,080 and 1080, and 1/2 and 0.5. The minus sign may be `-`, U+2212, an en dash or a
full-width minus. Other numbers, such as `\frac{1}{2}` and `10^{3}`, are expressions.

This module imports only the standard library, so that a worker process can load it alone.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
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
    rf"[-+]?(?:{_DIGITS}/(?!0+\Z){_DIGITS}|(?:{_DIGITS}(?:\.[0-9]+)?|\.[0-9]+){_POWER})"
)
# A minus sign directly after a word or number is not part of the next number. The last number of
# "10-18" is therefore 18 and not -18.
_NUMBER_IN_TEXT = re.compile(
    rf"(?:(?<![0-9A-Za-z).])-[$€£¥]?)?"
    rf"(?:{_DIGITS}/[1-9][0-9]*|{_DIGITS}(?:\.[0-9]+)?{_POWER}|(?<![0-9A-Za-z.])\.[0-9]+{_POWER})"
)
_ENDS = "$€£¥%°*,:= \t\r\n\u00a0\u202f"  # removed only at the ends, because 5*3 must not become 53
_LATEX = (("{,}", ","), (r"\left", ""), (r"\right", ""), (r"^\circ", ""), (r"^{\circ}", ""),
          (r"\(", ""), (r"\)", ""), (r"\[", ""), (r"\]", ""), (r"\$", "$"), (r"\%", "%"),
          (r"\,", ""), (r"\!", ""))  # fmt: skip
_WRAPPER = re.compile(
    r"\\(?:boxed|fbox|mbox|text(?:bf|rm|it)?|math(?:rm|bf|it|sf))\s?"
    r"\{([^{}]*(?:\{[^{}]*\}[^{}]*)*)\}"
)
_THOUGHT = re.compile(r"[<\[](/?)(?:think|thinking|thought|reasoning)[>\]]", re.I)
_OPEN_TAG = re.compile("<answer>", re.I)
_CLOSE_TAG = re.compile("</answer>", re.I)
_LINK = re.compile(
    r"[\s$;)]{0,9}+(?:,|\bor\b|\band\b)[\s$]{0,9}(?:(?:or|and)\b[\s$]{0,9})?(?:[A-Za-z] ?= ?)?"
)
_BRACE = re.compile(r"\\(?:boxed|fbox)\s*\{|[{}]")
# What stands before or after a number that is a part of an expression, as in `x^2` and `2\pi`.
_BEFORE_PART = re.compile(r"(?:[\^_√]|\^\{|_\{|\}\{|sqrt\{|frac\{)-?\Z")
_AFTER_PART = re.compile(
    r"[\^_√π²³]|\}\{| ?\\(?:pi|sqrt|frac|dfrac|times|cdot|pm|infty|theta|alpha|ln|log)"
    r"|[A-Za-z](?![A-Za-z])|pi\b| (?:pi|dozen|hundred|thousand|million|billion|trillion)\b"
)


def turns(completions: Sequence[str], prefills: Sequence[str] | None) -> list[str]:
    """Return each completion, preceded by its prefill if the prefill contains a tag.

    A prefill is the beginning of the assistant's turn that the prompt already contains. The
    completion may close its tag, such as `<think>`.
    """
    pairs = zip(prefills or [""] * len(completions), completions, strict=True)
    return [f"{prefill}{text}" if "<" in prefill else text for prefill, text in pairs]


def final_part(text: str) -> str:
    """Return the text after the last closed thought. It ends before a thought that stays open."""
    tags = list(_THOUGHT.finditer(text))
    start = max((tag.end() for tag in tags if tag[1]), default=0)
    end = next((tag.start() for tag in tags if tag.start() >= start), len(text))
    return text[start:end]


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


def last_latex(text: str) -> str | None:
    r"""Return the content of the last `$…$`, `\(…\)` or `\[…\]` of a text, or None."""
    text = text.replace("$$", "$")
    found = []
    for opening, closing in (("$", "$"), (r"\(", r"\)"), (r"\[", r"\]")):
        end = text.rfind(closing)
        start = text.rfind(opening, 0, max(end, 0))
        if start >= 0:
            found.append((end, text[start + len(opening) : end]))
    return max(found)[1] if found else None


def _last_box(text: str) -> tuple[int, str] | None:
    r"""Return the position and content of the last \boxed{…} with balanced braces, or None.

    If several boxes are linked, as in `\boxed{2} or \boxed{3}`, the content lists them all.
    """
    opened: list[re.Match[str]] = []  # the braces that are still open, with the \boxed before them
    boxes: list[tuple[re.Match[str], re.Match[str]]] = []  # the start and end of each box
    for brace in _BRACE.finditer(text):
        if brace[0] != "}":
            opened.append(brace)
        elif opened:
            start = opened.pop()
            if start[0] != "{":
                boxes.append((start, brace))
    contents: list[str] = []
    place = len(text)
    for start, end in reversed(boxes):
        if contents and not _LINK.fullmatch(text, end.end(), place):
            break
        contents.insert(0, text[start.end() : end.start()])
        place = start.start()
    return (place, ", ".join(contents)) if contents else None


def last_number(text: str) -> str | None:
    r"""Return the last number of a text, or None if it is a part of an expression or a large unit.

    In `2\pi`, `x^2`, `\frac{1}{2}` and `2 million`, the number alone is not the answer.
    """
    found = list(_NUMBER_IN_TEXT.finditer(text.translate(_MINUS)))
    if not found:
        return None
    start, end = found[-1].span()
    is_part = _BEFORE_PART.search(text[max(start - 8, 0) : start]) or _AFTER_PART.match(text, end)
    return None if is_part else found[-1][0]


def read_gold(answer: str) -> str:
    r"""Extract the gold answer from text, such as a full solution.

    If the text marks a number (`#### $1,080`, `<answer>18</answer>`, `\boxed{18}`), return the
    number. If it marks other content, return this content. Otherwise return the full text. A line
    with `####` that is not the last line and contains no number may be a heading, and is no mark.
    """
    final = final_part(answer)
    final = final.strip() if final.strip() and final != answer else answer
    content = marked_content(final)
    number = None if content is None else parse_number(content)
    if number is not None:
        return f"{number:f}" if isinstance(number, Decimal) else str(number)
    if HASHES not in final.rpartition("\n")[2]:
        content = marked_content(final, (TAG, BOXED))
    return (content or "").strip() or final


def parse_number(text: str) -> Number | None:
    """Parse text that consists of a single number. Return None for any other text.

    Currency signs, LaTeX and similar decorations of the number are ignored.
    """
    bare = text.translate(_MINUS)
    for latex, plain in _LATEX:
        bare = bare.replace(latex, plain)
    bare = bare.strip(_ENDS).removesuffix(".").rstrip(_ENDS)
    bare = unwrapped(bare).strip(_ENDS)
    if bare[:1] in ("-", "+"):
        bare = bare[0] + bare[1:].lstrip(_ENDS)
    if not _NUMBER.fullmatch(bare) or sum(map(str.isdigit, bare)) > MAX_DIGITS:
        return None
    plain = bare.replace(",", "")
    return Fraction(plain) if "/" in plain else Decimal(plain)


def unwrapped(text: str) -> str:
    r"""Return the content of `\boxed{…}` or `\text{…}`, or the text itself if it has no wrapper."""
    found = _WRAPPER.fullmatch(text)
    return text if found is None else found[1]
