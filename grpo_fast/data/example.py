"""What every data source yields, and the error every source raises."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

# Plain text, or chat messages for the tokenizer's chat template.
Prompt = str | list[dict[str, str]]


class Example(NamedTuple):
    """One question."""

    prompt: Prompt  # for the policy
    answer: str | None  # for the rewards; None: there is none
    solution: str | None  # gold text, for a warm start
    fields: Mapping[str, Any] = MappingProxyType({})  # what else its record holds


class DatasetError(ValueError):
    """A data source that cannot be used; the message names the file and line, or the argument."""


class DataSource(Protocol):
    """The part of a data config all sources read (see `load_examples` for the rest)."""

    @property
    def task(self) -> Any: ...
