"""Base class of all configuration sections, and the types that their fields share."""

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
LIMIT = 1 << 53  # larger integers change their value in JSON readers that use doubles
Count = Annotated[int, Field(ge=0, lt=LIMIT)]
Positive = Annotated[int, Field(ge=1, lt=LIMIT)]
Size = Annotated[int, Field(ge=1, le=1 << 20)]  # number of items in memory at the same time
# YAML reads an unquoted `off` as false.
Off = BeforeValidator(lambda value: "off" if value is False else value)
CommaList = BeforeValidator(  # reads k=1,4,8, which YAML takes for one string
    lambda value: value if value is None or isinstance(value, list) else str(value).split(",")
)


class Section(BaseModel):
    """Part of the configuration: refuses unknown keys and numbers that are not finite.

    The docstring below a field is the sentence that `grpo-fast config` prints for the field.
    """

    model_config = ConfigDict(
        extra="forbid", validate_assignment=True, protected_namespaces=(), allow_inf_nan=False,
        use_attribute_docstrings=True,
    )  # fmt: skip
    more_keys: ClassVar[frozenset[str]] = frozenset()  # keys of the section that are not fields

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_truths(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse true and false where a number is expected. Pydantic would read 1 and 0."""
        types = set(members(cls.model_fields[str(info.field_name)].annotation))
        given = value if isinstance(value, list) else [value]
        is_number = bool not in types and types & {int, float}
        if is_number and any(isinstance(item, bool) for item in given):
            raise ValueError("expected a number")
        return value


@contextmanager
def named_in(section: str) -> Iterator[None]:
    """Put the section's name in front of the message of a ValueError."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{section}.{error}") from None


def members(annotation: Any) -> Iterator[Any]:
    """Yield a type and its parts: `list[int] | None` has the parts list[int], int and None."""
    yield annotation
    for part in get_args(annotation):
        yield from members(part)
