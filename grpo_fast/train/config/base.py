"""The parts of every configuration: strict sections, their refusals, paths, bounded numbers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from grpo_fast.errors import require as require


def home_path(path: str) -> str:
    """`path` with its `~` written out. Raises ValueError where that stands for no home folder."""
    expanded = os.path.expanduser(path)
    if expanded.startswith("~"):
        raise ValueError("expected the home folder of a known user behind ~ (./~ is a file's name)")
    return expanded


UserPath = Annotated[str, AfterValidator(home_path)]
LIMIT = 1 << 53  # JSON's readers agree on the integers below
Count = Annotated[int, Field(ge=0, lt=LIMIT)]
Positive = Annotated[int, Field(ge=1, lt=LIMIT)]
Size = Annotated[int, Field(ge=1, le=1 << 20)]  # of something that is held in memory at once
# For a choice of words: YAML takes this one for false.
Off = BeforeValidator(lambda value: "off" if value is False else value)
Decay = Annotated[float, Field(ge=0, lt=1)]
CommaList = BeforeValidator(  # k=1,4,8
    lambda came: came if came is None or isinstance(came, list) else str(came).split(",")
)


def reward_sections(rewards: Any) -> Any:
    """Return rewards given by their names alone as sections: rewards=myreward.py:reward."""
    listed = [rewards] if isinstance(rewards, (str, dict)) else rewards
    if not isinstance(listed, list):
        return listed
    return [{"name": reward} if isinstance(reward, str) else reward for reward in listed]


class Section(BaseModel):
    """A part of the configuration: no unknown keys, finite numbers, checks on assignment too.

    The docstring below a field is what `grpo-fast config` prints about the field.
    """

    model_config = ConfigDict(
        extra="forbid", validate_assignment=True, protected_namespaces=(), allow_inf_nan=False,
        use_attribute_docstrings=True,
    )  # fmt: skip


@contextmanager
def named_in(section: str) -> Iterator[None]:
    """Put the section's name before an error that names one of its fields."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{section}.{error}") from None


def members(annotation: Any) -> Iterator[Any]:
    """A type and all that it is made of: `list[int] | None` is made of list[int], int and None."""
    yield annotation
    for part in get_args(annotation):
        yield from members(part)
