"""Refusals of wrong arguments, and the errors that end a run: a class for each cause, all below
`RunError`, which commands catch.

A wrong argument is no `RunError`: it is a ValueError that names the argument.
"""

from __future__ import annotations

import functools
import inspect
import reprlib
import signal
from collections.abc import Callable, Collection, Iterable
from difflib import SequenceMatcher
from typing import Any, TypeVar

FP32_MAX = 3.4028234663852886e38  # the kernels compute in fp32
# No sampled token and no likeliest id is less likely. vLLM writes -9999 for NaN and for -inf.
LEAST_LOGP = -1000.0
LONGEST_WORD = 200  # letters of a word that is compared with known names
SAVED = 75  # exit status of a run that was saved: EX_TEMPFAIL, try again


def wrong(name: str, expected: str, came: object, kind: type[Exception] = ValueError) -> Exception:
    """An error that names an argument, what was expected and what came."""
    return kind(f"{name}: expected {expected}, got {came}")


def require(
    fits: object, name: str, expected: str, came: object, kind: type[Exception] = ValueError
) -> None:
    """Raise what `wrong` makes unless it fits. Where a call may be part of a graph of torch.compile
    `raise wrong(…)`: a text that is made of shapes or numbers beforehand breaks the graph.
    """
    if not fits:
        raise wrong(name, expected, came, kind)


def conflict(a: str, b: str, why: str) -> ValueError:
    """Return the error for two settings that do not fit together.

    Args:
        a, b: the settings with their values, for example "reference.kind=none" and "loss.beta=0.1".
        why: the reason, and what to do instead.
    """
    return ValueError(f"{a} conflicts with {b}: {why}")


def choice(name: str, value: object, choices: Collection[str]) -> None:
    """Raise a ValueError that lists the choices unless `value` is one of them."""
    if not isinstance(value, str) or value not in choices:
        raise wrong(name, f"one of {list(choices)}", repr(value))


def number(name: str, value: object, expected: str, holds: Callable[[float], bool]) -> None:
    """Raise a ValueError unless `value` is a finite number for which `holds(value)`."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        # The kernels compute in fp32. The bound refuses NaN, and integers that no float can hold.
        if abs(value) <= FP32_MAX and holds(value):
            return
    raise wrong(name, expected, reprlib.repr(value))


def nearest_name(word: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the known name most like a word, ignoring case and sections; None if none is near."""
    letters = word[:LONGEST_WORD].casefold()

    def likeness(name: str) -> tuple[bool, float]:
        last = name.casefold().rpartition(".")[2]
        # gpro is as like gspo as grpo, but two letters change places more often than one is wrong.
        return sorted(last) == sorted(letters), SequenceMatcher(None, last, letters).ratio()

    best = max(known, key=likeness, default=None)
    return best if best is not None and max(likeness(best)) >= cutoff else None


Kind = TypeVar("Kind", bound=type)


def names_nearest(kind: Kind) -> Kind:
    """Let a class, a dataclass or a NamedTuple, name the nearest field for an unknown keyword."""
    name = "__new__" if issubclass(kind, tuple) else "__init__"
    build: Callable[..., Any] = getattr(kind, name)
    known = [x for x in inspect.signature(build).parameters if x not in ("self", "_cls")]

    @functools.wraps(build)
    def checked(self: object, *arguments: object, **keywords: object) -> Any:
        if not keywords.keys() <= fields:
            word = next(x for x in keywords if x not in fields)
            near = nearest_name(word, known)
            hint = f"; nearest: {near}" if near else ""
            raise TypeError(f"{kind.__name__}() got an unexpected keyword argument {word!r}{hint}")
        return build(self, *arguments, **keywords)

    fields = frozenset(known)
    setattr(kind, name, checked)
    return kind


def kind_of(x: object) -> str:
    return f"shape {tuple(x.shape)}" if hasattr(x, "shape") else repr(x)


class RunError(RuntimeError):
    """A run cannot go on. The message says why, and where it was saved if it was."""


class EngineError(RunError):
    """A rollout engine is gone, or answers with something that cannot be used."""


class NonFiniteLogits(RunError):
    """The policy's logits are NaN or infinite: nothing can be sampled from them."""


class RewardError(RunError):
    """Too many samples have no reward. The message names the function and its last error."""


class NonFiniteGradient(RunError):
    """Too many gradients in a row were NaN or infinite."""


class WriteError(RunError):
    """A run's file could not be written. The file holds what it held before."""


class RankError(RunError):
    """Another rank has failed or does not answer. The message names it."""


class Stopped(SystemExit):
    """A signal ended the run. `code` is SAVED once a checkpoint holds it, before 128 + signal.

    As a SystemExit it passes every `except Exception`, and the process ends with the code.
    """

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self.number = number
        self.name = signal.Signals(number).name
