"""Examples for training and evaluation, which are read from files or the hub, or generated.

This file has the type of all examples, and a base class for sequences that compute examples on
demand.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

FILES = ("gsm8k", "jsonl")
TASKS = ("sort", "open", *FILES)
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


class LazySequence(Sequence[Example]):
    """A sequence of `length` examples. An example is computed when it is read."""

    length: int

    @abstractmethod
    def make(self, index: int) -> Example:
        """Compute the example at an index from 0 to length - 1."""

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: Any) -> Any:
        places = range(self.length)[index]
        return [self.make(i) for i in places] if isinstance(index, slice) else self.make(places)
