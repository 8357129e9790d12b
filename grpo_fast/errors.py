"""Errors for invalid arguments, and the exceptions that end a run.

An invalid argument raises a ValueError that names the argument, the expected value and the actual
value. A run that cannot continue raises a subclass of `RunError`, which the commands catch.
"""

from __future__ import annotations

import functools
import inspect
import reprlib
import signal
from collections.abc import Callable, Collection, Iterable
from difflib import SequenceMatcher
from typing import TypeVar, cast

FP32_MAX = 3.4028234663852886e38  # Largest finite fp32 number. The kernels compute in fp32.
# Smallest log-probability that is accepted as a real value. vLLM writes -9999 in place of NaN and
# -inf. Real log-probabilities of sampled or most likely tokens are always far above -1000.
LEAST_LOGP = -1000.0
LONGEST_WORD = 200  # letters of a word that are compared with known names
SAVED = 75  # exit status of a run that was saved: EX_TEMPFAIL, "try again"


def argument_error(
    name: str, expected: str, came: object, kind: type[Exception] = ValueError
) -> Exception:
    """Return an error that names an argument, the expected value and the actual value.

    Args:
        name: the argument.
        expected: the values that are allowed, as a phrase that follows "expected".
        came: the actual value.
        kind: the exception class.
    """
    return kind(f"{name}: expected {expected}, got {came}")


def require(
    fits: object, name: str, expected: str, came: object, kind: type[Exception] = ValueError
) -> None:
    """Raise the error of `argument_error` unless `fits` is true.

    Functions that torch.compile may trace use `raise argument_error(...)` instead, because building
    the message on every call, from shapes or numbers, would break the graph.

    Args:
        fits: the condition, evaluated as a bool.
        name: the argument.
        expected: the values that are allowed, as a phrase that follows "expected".
        came: the actual value.
        kind: the exception class.
    """
    if not fits:
        raise argument_error(name, expected, came, kind)


def conflict(a: str, b: str, why: str) -> ValueError:
    """Return the error for two settings that cannot be combined.

    Args:
        a: the first setting with its value, for example "reference.kind=none".
        b: the second setting with its value, for example "loss.beta=0.1".
        why: the reason, and what to do instead.
    """
    return ValueError(f"{a} conflicts with {b}: {why}")


def choice(name: str, value: object, choices: Collection[str]) -> None:
    """Raise a ValueError that lists the choices unless `value` is one of them."""
    if not isinstance(value, str) or value not in choices:
        raise argument_error(name, f"one of {list(choices)}", repr(value))


def number(name: str, value: object, expected: str, holds: Callable[[float], bool]) -> None:
    """Raise a ValueError unless `value` is a finite number for which `holds(value)` is true."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        # Every number must fit into fp32, because the kernels compute in fp32. The comparison also
        # rejects NaN, and integers that are too large for a float.
        if abs(value) <= FP32_MAX and holds(value):
            return
    raise argument_error(name, expected, reprlib.repr(value))


def nearest_name(word: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the known name that is most similar to a word, or None if no name is similar.

    The comparison ignores case. For a dotted name such as "loss.beta" only the last part is
    compared.

    Args:
        word: the unknown word.
        known: the valid names.
        cutoff: smallest similarity, from 0 to 1, that is accepted.
    """
    letters = word[:LONGEST_WORD].casefold()

    def likeness(name: str) -> tuple[bool, float]:
        last = name.casefold().rpartition(".")[2]
        # SequenceMatcher finds "gpro" equally similar to "gspo" and "grpo". Swapped letters are the
        # more frequent mistake, so prefer the name with the same letters.
        return sorted(last) == sorted(letters), SequenceMatcher(None, last, letters).ratio()

    best = max(known, key=likeness, default=None)
    return best if best is not None and max(likeness(best)) >= cutoff else None


def nearest_hint(word: str, known: Iterable[str]) -> str:
    """Return the end of an error message that suggests the nearest known name, or ""."""
    near = nearest_name(word, known)
    return f"; nearest: {near}" if near else ""


Target = TypeVar("Target", bound=Callable[..., object])


def names_nearest(target: Target) -> Target:
    """Make a function, dataclass or NamedTuple suggest the nearest name for an unknown keyword."""
    if not isinstance(target, type):
        return cast(Target, _checks_keywords(target, target.__name__))
    name = "__new__" if issubclass(target, tuple) else "__init__"
    setattr(target, name, _checks_keywords(getattr(target, name), target.__name__))
    return cast(Target, target)


def _checks_keywords(build: Callable[..., object], owner: str) -> Callable[..., object]:
    """Wrap `build` with a check for unknown keywords.

    The error message calls the function or class `owner`.
    """
    known = [x for x in inspect.signature(build).parameters if x not in ("self", "_cls")]
    fields = frozenset(known)

    @functools.wraps(build)
    def checked(*arguments: object, **keywords: object) -> object:
        if not keywords.keys() <= fields:
            raise unknown_keyword(owner, next(x for x in keywords if x not in fields), known)
        return build(*arguments, **keywords)

    return checked


def unknown_keyword(owner: str, word: str, known: Iterable[str]) -> TypeError:
    """Return the error for an unknown keyword, which suggests the nearest known keyword.

    Args:
        owner: name of the function or class.
        word: the unknown keyword.
        known: the keywords that exist.
    """
    hint = nearest_hint(word, known)
    return TypeError(f"{owner}() got an unexpected keyword argument {word!r}{hint}")


def kind_of(x: object) -> str:
    """Describe a value for an error message: a tensor by its shape, any other value by its repr."""
    return f"shape {tuple(x.shape)}" if hasattr(x, "shape") else repr(x)


class RunError(RuntimeError):
    """Error that ends a run.

    The message gives the reason and says where the run was saved, if it was.
    """


class EngineError(RunError):
    """Raised if a rollout engine has stopped or has returned an unusable answer."""


class NonFiniteLogits(RunError):
    """Raised if the policy has NaN or infinite logits, from which no token can be sampled."""


class RewardError(RunError):
    """Raised if too many samples have no reward.

    The message names the reward function and its last error.
    """


class NonFiniteGradient(RunError):
    """Raised if too many consecutive gradients were NaN or infinite."""


class WriteError(RunError):
    """Raised if a file of a run could not be written.

    The previous version of the file is intact.
    """


class RankError(RunError):
    """Raised if another rank failed or does not answer."""


class Stopped(SystemExit):
    """Exit of the process after a signal has ended the run.

    The class derives from SystemExit, so that no `except Exception` catches it. The exit status
    `code` is 128 + the signal's number, or SAVED if a checkpoint of the run was written.

    Args:
        number: the signal's number.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)  # pickle passes this argument to the class again
        self.code = 128 + number
        self.number = number
        self.name = signal.Signals(number).name
