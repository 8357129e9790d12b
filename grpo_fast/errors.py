"""Functions that raise errors for invalid arguments, and the exceptions that end a run.

An invalid argument raises a ValueError that names the argument, the expected value and the actual
value. A run that cannot continue raises a subclass of `RunError`. Messages quote exceptions and
untrusted text through `reason` and `escape_control`.
"""

from __future__ import annotations

import reprlib
import signal
import unicodedata
from collections.abc import Callable, Collection, Iterable
from difflib import SequenceMatcher

FP32_MAX = 3.4028234663852886e38  # the largest finite number in fp32, the dtype of the kernels
# Log-probabilities below this limit are rejected as placeholders. For example, vLLM reports -9999
# instead of NaN and -inf. Real log-probabilities of sampled tokens are far above the limit.
LEAST_LOGP = -1000.0
LONGEST_WORD = 200  # number of letters of an unknown word that are compared with known names
REASON = 400  # largest number of characters that a message quotes from an exception's text
SAVED = 75  # exit status of a stopped run that can be resumed (EX_TEMPFAIL, "try again later")
_INVISIBLE = frozenset(("Cc", "Cf", "Cs", "Zl", "Zp"))  # categories of characters to escape


def argument_error(
    name: str, expected: str, came: object, kind: type[Exception] = ValueError
) -> Exception:
    """Build an error that names an argument, the expected value and the actual value.

    Args:
        name: the argument.
        expected: description of the allowed values. It follows "expected" in the message.
        came: the actual value.
        kind: the exception class.
    """
    return kind(f"{name}: expected {expected}, got {came}")


def require(
    fits: object, name: str, expected: str, came: object, kind: type[Exception] = ValueError
) -> None:
    """Raise `argument_error(name, expected, came, kind)` unless `fits` is true.

    Do not call this function in code that torch.compile traces. The arguments of the message are
    evaluated even if the condition holds, which can break the graph. Use an `if` statement and
    `raise argument_error(...)` there.

    Args:
        fits: the condition, evaluated as a bool.
        name: the argument.
        expected: description of the allowed values. It follows "expected" in the message.
        came: the actual value.
        kind: the exception class.
    """
    if not fits:
        raise argument_error(name, expected, came, kind)


def conflict(a: str, b: str, why: str) -> ValueError:
    """Build the error for two settings that cannot be combined.

    Args:
        a: the first setting with its value, for example "reference.kind=none".
        b: the second setting with its value, for example "loss.beta=0.1".
        why: the reason for the conflict, and what to do instead.
    """
    return ValueError(f"{a} conflicts with {b}: {why}")


def choice(name: str, value: object, choices: Collection[str]) -> None:
    """Raise a ValueError that lists the valid choices, unless `value` is one of them."""
    if not isinstance(value, str) or value not in choices:
        raise argument_error(name, f"one of {list(choices)}", repr(value))


def number(name: str, value: object, expected: str, holds: Callable[[float], bool]) -> None:
    """Raise a ValueError unless `value` is a finite number for which `holds(value)` is true."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        # Reject numbers that overflow in fp32, the dtype of the kernels. This comparison also
        # rejects NaN, and integers that are too large for a float.
        if abs(value) <= FP32_MAX and holds(value):
            return
    came = kind_of(value)
    if name.endswith("temperature") and (isinstance(value, (list, tuple)) or _shape_of(value)):
        came += "; call once for each temperature"
    raise argument_error(name, expected, came)


def nearest_name(word: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the known name that is most similar to a word, or None if no name is similar.

    The comparison ignores case. If a known name has dots, such as "loss.beta", only its last part
    is compared.

    Args:
        word: the unknown word.
        known: the valid names.
        cutoff: minimum similarity of the result, from 0 (different) to 1 (equal).
    """
    letters = word[:LONGEST_WORD].casefold()

    def likeness(name: str) -> tuple[bool, float]:
        last = name.casefold().rpartition(".")[2]
        # Prefer a name that has the same letters in a different order, because people often swap
        # letters. SequenceMatcher alone finds "gpro" equally similar to "gspo" and "grpo".
        return sorted(last) == sorted(letters), SequenceMatcher(None, last, letters).ratio()

    best = max(known, key=likeness, default=None)
    return best if best is not None and max(likeness(best)) >= cutoff else None


def nearest_hint(word: str, known: Iterable[str]) -> str:
    """Return a hint such as "; nearest: NAME" for an error message, or "" if no name is similar."""
    near = nearest_name(word, known)
    return f"; nearest: {near}" if near else ""


def kind_of(x: object) -> str:
    """Describe a value in an error message: by its shape if it has one, otherwise by its repr.

    An array without a dimension is described by its repr. A long repr is abbreviated.
    """
    shape = _shape_of(x)
    return f"shape {shape}" if shape else reprlib.repr(x)


def _shape_of(x: object) -> tuple[int, ...]:
    """Return the shape of an array, or () if x is a number or another object."""
    shape = getattr(x, "shape", ())  # the attribute of a class, such as torch.Tensor, is no tuple
    return tuple(shape) if isinstance(shape, tuple) else ()


# Without these escapes, untrusted text could send control sequences to a terminal.
def escape_control(text: str) -> str:
    r"""Return text with its control, bidi and invisible characters written as escapes.

    For example, the ESC character becomes the four characters `\x1b`. Line ends and tabs are kept.
    """
    hidden = {c for c in text if c not in "\n\t" and unicodedata.category(c) in _INVISIBLE}
    return "".join(c.encode("unicode_escape").decode() if c in hidden else c for c in text)


def reason(error: BaseException) -> str:
    """Return the message of an exception in one line of limited length, without C++ stack frames.

    The name of the exception's class comes first, except for a ValueError or OSError.
    """
    text = " ".join(str(error).partition("Exception raised from")[0].split())
    if not text or not isinstance(error, (ValueError, OSError)):
        text = f"{type(error).__name__}: {text}".removesuffix(": ")
    return text if len(text) <= REASON else f"{text[:REASON]}…"


class RunError(RuntimeError):
    """Base class of errors that end a run.

    The message and its notes say why the run ended. If the run was saved, they also say where.
    """


class EngineError(RunError):
    """Raised if a rollout engine has stopped or has returned an unusable answer."""


class NonFiniteLogits(RunError):
    """Raised if the policy computes NaN or infinite logits, so that no token can be sampled."""


class RewardError(RunError):
    """Raised if too many samples have no reward.

    The message names the reward function and its last error.
    """


class NonFiniteGradient(RunError):
    """Raised if too many consecutive gradients were NaN or infinite."""


class WriteError(RunError):
    """Raised if a file of a run could not be written.

    If the file existed before, its previous content is intact.
    """


class RankError(RunError):
    """Raised on one rank because another rank has failed or does not answer."""


class Stopped(SystemExit):
    """Raised to end the run and its process after a signal.

    The class derives from SystemExit, so that `except Exception` does not catch it. The exit status
    `code` is 128 plus the number of the signal, or SAVED if the run has written a checkpoint.

    Args:
        number: number of the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)  # unpickling calls the class with this argument
        self.code = 128 + number
        self.number = number
        self.name = signal.Signals(number).name
