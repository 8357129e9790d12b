"""Base class of all configuration sections, and field types that several sections use."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any, get_args

from annotated_types import Interval
from pydantic import AfterValidator, BaseModel, ConfigDict

from grpo_fast.errors import require as require

UserPath = Annotated[str, AfterValidator(os.path.expanduser)]
LIMIT = 1 << 53  # a JSON reader that stores numbers as doubles would round larger integers
# Use Interval, not pydantic's Field. pydantic 2.8 stores the default of one dataclass field in the
# shared Field object, so that all other dataclass fields of this type become optional.
Count = Annotated[int, Interval(ge=0, lt=LIMIT)]
Positive = Annotated[int, Interval(ge=1, lt=LIMIT)]
Size = Annotated[int, Interval(ge=1, le=1 << 20)]  # number of items in memory at the same time


class Section(BaseModel):
    """Base class of configuration sections. It rejects unknown keys and non-finite numbers.

    Validation is strict. For example, `true` is not accepted as the integer 1. `grpo-fast config`
    prints the docstring below a field as the description of the field.
    """

    model_config = ConfigDict(
        extra="forbid", strict=True, validate_assignment=True, protected_namespaces=(),
        allow_inf_nan=False, use_attribute_docstrings=True,
    )  # fmt: skip


@contextmanager
def named_in(section: str) -> Iterator[None]:
    """Prefix the message of a ValueError raised in the `with` block with `section` and a dot."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{section}.{error}") from None


def members(annotation: Any) -> Iterator[Any]:
    """Yield a type and, recursively, all types that it contains as arguments.

    For example, `list[int] | None` yields the union itself, `list[int]`, `int` and `NoneType`.
    """
    yield annotation
    for part in get_args(annotation):
        yield from members(part)
