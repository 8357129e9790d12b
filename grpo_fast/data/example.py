"""The example that every data source yields, and the error that every source raises."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, TypeVar

from grpo_fast.errors import require

# Plain text, or chat messages for the tokenizer's chat template.
Prompt = str | list[dict[str, str]]


class Example(NamedTuple):
    """One question."""

    prompt: Prompt  # for the policy
    answer: str | None  # for the rewards; None: there is none
    solution: str | None  # gold text, for a warm start
    fields: Mapping[str, Any] = MappingProxyType({})  # what else its record holds
    label: Any = None  # the answer as its record holds it; None: `answer`


def words_of(example: Example) -> set[str]:
    prompt = example.prompt
    asked = [prompt] if isinstance(prompt, str) else [message["content"] for message in prompt]
    texts = [*asked, example.answer, example.solution]
    return {word for text in texts if text for word in text.split()}


class DatasetError(ValueError):
    """A data source that cannot be used; the message names the file and line, or the argument."""


def need(fits: Any, where: str, expected: str, came: Any) -> None:
    """Raise a DatasetError, with the place, the expected and the given value, unless it fits."""
    require(fits, where, expected, came, DatasetError)


Item = TypeVar("Item")


class Made(Sequence[Item]):
    """A sequence whose items are computed when they are read."""

    length: int

    @abstractmethod
    def make(self, index: int) -> Item:
        """Item 0 … length − 1."""

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: Any) -> Any:
        places = range(self.length)[index]
        return [self.make(i) for i in places] if isinstance(index, slice) else self.make(places)


class DataSource(Protocol):
    """The part of a data config all sources read (see `load_examples` for the rest)."""

    task: Any
