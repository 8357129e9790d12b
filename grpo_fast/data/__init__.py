"""Examples for training and evaluation, which are read from files or the hub, or generated.

This file has the type of all examples, a base class for sequences that compute examples on demand,
and the escaping of untrusted text.
"""

from __future__ import annotations

import unicodedata
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

FILES = ("gsm8k", "jsonl")
TASKS = ("sort", "open", *FILES)
REASON = 400  # largest number of characters that a message quotes from an exception's text
_INVISIBLE = frozenset(("Cc", "Cf", "Cs", "Zl", "Zp"))
# Type of a prompt: plain text, or a list of chat messages for the tokenizer's chat template.
Prompt = str | list[dict[str, str]]
# A parsed JSON object, or the columns of a row.
Fields = Mapping[str, Any]


class Example(NamedTuple):
    """One question with its gold answer.

    Attributes:
        prompt: text or chat messages for the policy.
        answer: gold answer for the reward functions, or None.
        solution: gold text for supervised training (warm start), or None.
        fields: all columns of the row in the data file, for reward functions.
        label: the answer in the row, before it was converted to text, of any type. None if the
            example has no answer, or was not read from a row.
        text: the prompt as text, if chat messages were built from it. Reward functions receive it.
    """

    prompt: Prompt
    answer: str | None
    solution: str | None
    fields: Fields = MappingProxyType({})
    label: object = None
    text: str | None = None


def text_of(prompt: Prompt) -> str:
    """Return a prompt as text. The texts of chat messages are joined by line ends."""
    return prompt if isinstance(prompt, str) else "\n".join(m["content"] for m in prompt)


Item = TypeVar("Item")


class LazySequence(Sequence[Item]):
    """A sequence of `length` items. An item is computed when it is read."""

    length: int

    @abstractmethod
    def make(self, index: int) -> Item:
        """Compute the item at an index from 0 to length - 1."""

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: Any) -> Any:
        places = range(self.length)[index]
        return [self.make(i) for i in places] if isinstance(index, slice) else self.make(places)


# Without these escapes, untrusted text could send control sequences to a terminal.
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
