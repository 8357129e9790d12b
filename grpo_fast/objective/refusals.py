"""Refusals of wrong options: a ValueError that names the option."""

from __future__ import annotations

import reprlib
from typing import Any

from torch import Tensor

from grpo_fast.errors import wrong
from grpo_fast.objective.losses import FP32_MAX


def choice(name: str, value: Any, choices: Any) -> None:
    """Raise a ValueError that lists the choices unless `value` is one of them."""
    if not isinstance(value, str) or value not in choices:
        raise wrong(name, f"one of {list(choices)}", repr(value))


def number(name: str, value: Any, expected: str, holds: Any) -> None:
    """Raise a ValueError unless `value` is a finite number for which `holds(value)`."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    # The kernels compute in fp32. The bound refuses NaN, too, and integers that no float can hold.
    if not is_number or not abs(value) <= FP32_MAX or not holds(value):
        raise wrong(name, expected, reprlib.repr(value))


def kind_of(x: object) -> str:
    return f"shape {tuple(x.shape)}" if isinstance(x, Tensor) else repr(x)
