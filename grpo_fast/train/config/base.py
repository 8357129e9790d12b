"""Base class of all configuration sections, and field types that several sections use."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any, ClassVar, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
)

from grpo_fast.errors import require as require


def home_path(path: str) -> str:
    """Return a path with `~` replaced by the home folder.

    Raises:
        ValueError: the path names the home folder of an unknown user.
    """
    expanded = os.path.expanduser(path)
    if expanded.startswith("~"):
        raise ValueError("expected the home folder of a known user (a file named ~ is ./~)")
    return expanded


UserPath = Annotated[str, AfterValidator(home_path)]
LIMIT = 1 << 53  # larger integers would be rounded by JSON readers that use doubles
Count = Annotated[int, Field(ge=0, lt=LIMIT)]
Positive = Annotated[int, Field(ge=1, lt=LIMIT)]
Size = Annotated[int, Field(ge=1, le=1 << 20)]  # number of items in memory at the same time
# YAML reads an unquoted `off` as false, so convert false back to "off".
Off = BeforeValidator(lambda value: "off" if value is False else value)
CommaList = BeforeValidator(  # splits k=1,4,8, which YAML reads as one text
    lambda value: value if value is None or isinstance(value, list) else str(value).split(",")
)


class Section(BaseModel):
    """Base class of configuration sections. It rejects unknown keys and non-finite numbers.

    `grpo-fast config` prints the docstring below a field as the description of the field.
    """

    model_config = ConfigDict(
        extra="forbid", validate_assignment=True, protected_namespaces=(), allow_inf_nan=False,
        use_attribute_docstrings=True,
    )  # fmt: skip
    more_keys: ClassVar[frozenset[str]] = frozenset()  # accepted keys that are not fields

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_truths(cls, value: Any, info: ValidationInfo) -> Any:
        """Reject booleans where a number is expected. Pydantic would convert them to 1 and 0."""
        types = set(members(cls.model_fields[str(info.field_name)].annotation))
        given = value if isinstance(value, list) else [value]
        is_number = bool not in types and types & {int, float}
        if is_number and any(isinstance(item, bool) for item in given):
            raise ValueError("expected a number")
        return value


@contextmanager
def named_in(section: str) -> Iterator[None]:
    """Prefix the message of a ValueError with the name of a section."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{section}.{error}") from None


def members(annotation: Any) -> Iterator[Any]:
    """Yield a type and all its type arguments.

    For `list[int] | None` these are the union, `list[int]`, `int` and `None`.
    """
    yield annotation
    for part in get_args(annotation):
        yield from members(part)
