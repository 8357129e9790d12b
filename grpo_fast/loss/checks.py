"""Checks of arguments, which raise a ValueError. This module has all tables of allowed values.

`tensor`, `head`, `hidden_layout` and `options` check dtypes, shapes, devices and numbers
immediately. `ValueChecks` checks the values of tensors. Values on the CPU are checked immediately,
and values on a GPU with `validate="full"`, too. With `validate="auto"`, the checks on a GPU do not
wait for the device: all numbers that they need are copied to the host in the background as one
tensor, and the next call that finds a wrong number raises the error. Until then, no kernel reads
out of bounds: ids are clamped, or the kernel ignores invalid ones.
"""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from grpo_fast.errors import argument_error, choice, conflict, number, require
from grpo_fast.kernels.gpu.launch import is_capturing
from grpo_fast.kernels.route import BACKENDS, uses_triton
from grpo_fast.kernels.types import is_sharded
from grpo_fast.kernels.workspace import copy_to_host_async
from grpo_fast.objective.aggregation import LEAST_TOTAL, Total
from grpo_fast.objective.config import LossConfig
from grpo_fast.objective.kl import DIVERGENCES

# ---- Tables

FLOATING = "a floating-point tensor (16, 32 or 64 bits)"
KINDS = {  # the allowed dtypes for each description in a message
    FLOATING: (torch.float16, torch.bfloat16, torch.float32, torch.float64),
    "an int64 or int32 tensor": (torch.int64, torch.int32),
    "an int64 tensor": (torch.int64,),
    "an int32 tensor (B+1,) for the packed layout": (torch.int32, torch.int64),
    "a tensor of 0 and 1": tuple(
        x for x in vars(torch).values() if isinstance(x, torch.dtype) and not x.is_complex
    ),
}
IDS, OFFSETS, PACKED, MASK = list(KINDS)[1:]
# The allowed words of each option, and the expectation and the predicate of each number.
WORDS = {"backend": BACKENDS, "validate": ("auto", "full"), "kind": tuple(DIVERGENCES)}
TOTALS = f"a number > 0 (at least {LEAST_TOTAL:g})"
NUMBERS: dict[str, tuple[str, Callable[[float], bool]]] = {
    "logit_scale": ("a finite number, not 0", lambda x: x != 0),
    "softcap": ("None or a finite number > 0", lambda x: x > 0),
    "temperature": ("a finite number > 0", lambda x: x > 0),
    "grad_filter": ("None or a number in (0, 1)", lambda x: 0 < x < 1),
    "beta": ("a number in (0, 1)", lambda x: 0 < x < 1),
    "coef": ("a finite number >= 0", lambda x: x >= 0),
    "floor": ("a number in (0, 1)", lambda x: 0 < x < 1),
    "num_items_in_batch": (TOTALS, lambda x: x >= LEAST_TOTAL),
    "num_completions_in_batch": (TOTALS, lambda x: x >= LEAST_TOTAL),
}
NO_FINITE_LOSS = "target_ids: expected targets of finite probability, got one whose logit is -inf"
NO_FINITE_LOGP = "logps: expected finite numbers at the active tokens, got -inf"
IGNORED_TARGET = -100
IGNORED_HINT = (
    f"; {IGNORED_TARGET} marks ignored labels in transformers: "
    f"pass completion_mask=(target_ids != {IGNORED_TARGET})"
)


class Rule(NamedTuple):
    """The allowed values of an argument. NaN is never allowed after `convert`."""

    expected: str  # description of the allowed values
    otherwise: str  # description of the wrong values, for a message about a GPU tensor
    low: float = -sys.float_info.max  # the least allowed value
    high: float = sys.float_info.max  # the greatest allowed value
    # Converts the values before they are compared with `low` and `high`.
    convert: Callable[[Tensor], Tensor] = lambda x: x
    hint: str = ""  # the usual cause of a value above `high`

    def judge(self, name: str, x: Tensor | None, low: float, high: float, _: float) -> str:
        """Return an error message if a converted value is not allowed, and "" if all are.

        Args:
            name: name of the argument.
            x: the values before `convert`. With them, the message contains the first wrong value
                and the number of wrong values. None on a GPU. The message then contains the text
                `self.otherwise` instead.
            low: the least value after `convert`.
            high: the greatest value after `convert`.
        """
        if self.low <= low and high <= self.high:
            return ""
        got = self.otherwise
        if x is not None:
            pairs = zip(x.tolist(), self.convert(x).tolist(), strict=True)
            bad = [value for value, number in pairs if not self.low <= number <= self.high]
            got = f"{bad[0]:g} ({len(bad)} of {x.numel()} values)"
        hint = self.hint if high > self.high else ""
        return f"{name}: expected {self.expected}, got {got}{hint}"


Rules = dict[str, Rule]  # keyed by the name of the argument
# The rules of most functions. old_logps may be -inf, because the ratio is clamped. ref_logps must
# be finite, because the KL would otherwise be infinite.
RULES: Rules = {
    "advantages": Rule("finite numbers", "NaN or inf"),
    "old_logps": Rule("numbers at the active tokens", "NaN", -math.inf, math.inf),
    "ref_logps": Rule("finite numbers at the active tokens", "NaN or inf"),
    "weights": Rule("finite numbers", "NaN or inf"),
    # Compare instead of computing x·(x - 1), because torch has no arithmetic for float8 and uint16.
    "completion_mask": Rule("only 0 and 1", "other values", 0, 0, lambda x: (x != 0) & (x != 1)),
}

# The rules of the losses that compute logps from logits. The old, reference and sampling logps of
# these losses are log-probabilities, so they may exceed 0 only by `ROUNDING`. `RULES` has no upper
# limit for logps, because `grpo_loss` also accepts log-densities of continuous actions, which may
# be positive.
ROUNDING = 1e-2  # a log-probability that is rounded to 16 bits may be this much above 0
ROUNDED = (
    ". The usual cause is a log_softmax of logits in 16 bits: compute it in fp32, or clamp the "
    "values at 0"
)
_LOGPS = f"log-probabilities, at most 0 (or {ROUNDING}, by rounding), at the active tokens"
LOGPS_RULES = RULES | {
    "old_logps": Rule(_LOGPS, "positive numbers, or NaN", -math.inf, ROUNDING, hint=ROUNDED),
    "ref_logps": Rule(
        f"finite {_LOGPS}", "positive numbers, NaN or inf", high=ROUNDING, hint=ROUNDED
    ),
    # Allow NaN, which marks a token without a logp from the sampler.
    "sampling_logps": Rule(
        _LOGPS, "positive numbers", -math.inf, ROUNDING, torch.nan_to_num, hint=ROUNDED
    ),
}


# ---- Tensors, shapes and options


def tensor(
    name: str,
    x: object,
    kind: str = FLOATING,
    shape: tuple[int, ...] | None = None,
    meaning: str = "",
    same_device: tuple[str, Tensor] | None = None,
) -> None:
    """Raise a ValueError unless x is a dense, unsharded tensor of the given kind.

    Args:
        name: name of the argument.
        x: the argument.
        kind: a key of KINDS.
        shape: the required shape. None allows any shape.
        meaning: the required shape in symbols such as "(V,)", for the message.
        same_device: the name and the tensor of another argument. x must be on its device.
    """
    if is_sharded(x):
        raise argument_error(name, "a plain tensor", f"a {type(x).__name__}")
    if not isinstance(x, Tensor) or x.dtype not in KINDS[kind]:
        raise argument_error(name, kind, f"dtype {x.dtype}" if isinstance(x, Tensor) else repr(x))
    if x.layout != torch.strided or x.is_nested:
        raise argument_error(name, "a dense tensor", "a nested one" if x.is_nested else x.layout)
    if shape is not None and tuple(x.shape) != shape:
        raise argument_error(name, f"shape {meaning} = {shape}", tuple(x.shape))
    if same_device is not None and x.device != same_device[1].device:
        raise argument_error(
            name, f"the device of {same_device[0]}, {same_device[1].device}", x.device
        )
    if x.is_meta:
        raise argument_error(name, "a tensor with values", "one on the meta device")


def like_logps(name: str, x: Tensor | None, like: Tensor, kind: str = FLOATING) -> None:
    """Check that an optional tensor has the shape and device of the logps."""
    if x is not None:
        meaning = "(B, L)" if like.dim() == 2 else "(T,)"
        tensor(name, x, kind, tuple(like.shape), meaning, ("the logps", like))


def constant(name: str, x: object) -> None:
    """Raise a ValueError if x requires grad, because its gradient is never computed."""
    if isinstance(x, Tensor) and x.requires_grad and torch.is_grad_enabled():
        came = f"one that requires grad; pass {name}.detach()"
        raise argument_error(name, "a tensor without a gradient", came)


def head(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    names: tuple[str, str, str] = ("hidden", "lm_head_weight", "bias"),
    *,
    is_shard: bool = False,
) -> None:
    """Check that hidden, weight and bias have matching shapes, dtypes and devices.

    Args:
        hidden: (..., H).
        weight: (V, H).
        bias: (V,), or None.
        names: names of the three arguments in the messages.
        is_shard: True if the weight has only the vocabulary rows of one rank, which may be empty.
    """
    # 1. Check the shapes. Each message names the argument that the caller must change.
    like, name, bias_name = names
    tensor(like, hidden)
    tensor(name, weight)
    width = tuple(hidden.shape)[-1:]
    shape = tuple(weight.shape)
    if len(shape) != 2:
        raise argument_error(name, "shape (V, H)", shape)
    if not width:
        raise argument_error(like, "shape (B, L, H) or (T, H)", ())
    if width != shape[1:]:
        expected = f"(V, H) with H = {width[0]} as in {like} {tuple(hidden.shape)}"
        raise argument_error(name, expected, shape)
    if 0 in shape[1 if is_shard else 0 :]:
        raise argument_error(name, "at least one vocabulary row and one column", shape)
    # 2. Check devices and dtypes.
    tensor(name, weight, same_device=(like, hidden))
    if hidden.dtype != weight.dtype:
        came = f"{weight.dtype}; cast one of them"
        raise argument_error(name, f"the dtype of {like}, {hidden.dtype}", came)
    if bias is not None:
        tensor(bias_name, bias, FLOATING, shape[:1], "(V,)", (like, hidden))


def hidden_layout(hidden: Tensor, target_ids: Tensor, hidden_rows: Tensor | None) -> None:
    """Check the shapes of hidden, target_ids and hidden_rows.

    `hidden` must have the layout of target_ids. With `hidden_rows`, it must have shape (R, H).
    """
    if hidden_rows is None:
        _layout("hidden", hidden, target_ids)
        return
    if hidden.dim() != 2:
        why = "its rows index the first of two dimensions; pass (R, H)"
        raise conflict(f"hidden of shape {tuple(hidden.shape)}", "hidden_rows", why)
    tensor("target_ids", target_ids, IDS, same_device=("hidden", hidden))
    if target_ids.dim() not in (1, 2):
        raise argument_error("target_ids", "shape (B, L) or (T,)", tuple(target_ids.shape))
    shape = tuple(target_ids.shape)
    tensor("hidden_rows", hidden_rows, IDS, shape, "that of target_ids", ("hidden", hidden))


def logits(x: Tensor, target_ids: Tensor) -> None:
    """Check that logits are (B, L, V) or (T, V), and that target_ids are (B, L) or (T,)."""
    tensor("logits", x)
    _layout("logits", x, target_ids)
    if x.shape[-1] == 0:
        raise argument_error("logits", "at least one vocabulary column", tuple(x.shape))


def inplace(x: Tensor, flat: Tensor) -> None:
    """Check that the logits x can be overwritten with their gradient.

    This requires that `flat` is a view of x, and that the rows of `flat` do not overlap.
    """
    shares = flat.shape[0] > 1 and flat.stride(0) < flat.shape[1]  # expanded or overlapping view
    if flat.data_ptr() != x.data_ptr() or shares:
        expected = "inplace=True expects rows that flatten without a copy and share no memory"
        raise ValueError(f"logits: {expected}, got strides {x.stride()}")


def is_config(config: object) -> None:
    require(isinstance(config, LossConfig), "config", "a LossConfig", type(config).__name__)


def _layout(name: str, x: Tensor, target_ids: Tensor) -> None:
    """Check that x is (B, L, K) with target_ids (B, L), or (T, K) with target_ids (T,)."""
    if x.dim() not in (2, 3):
        raise argument_error(name, "shape (B, L, ·) or (T, ·)", tuple(x.shape))
    tensor("target_ids", target_ids, IDS, same_device=(name, x))
    if target_ids.shape != x.shape[:-1]:
        expected = f"shape {tuple(x.shape[:-1])} as in {name} {tuple(x.shape)}"
        raise argument_error("target_ids", expected, tuple(target_ids.shape))


def options(**given: object) -> None:
    """Check words and numbers by the tables WORDS and NUMBERS.

    The name of a number may begin with "teacher.".
    """
    for name, value in given.items():
        if name in WORDS:
            choice(name, value, WORDS[name])
            continue
        expected, holds = NUMBERS[name.removeprefix("teacher.")]
        if value is not None or not expected.startswith("None"):
            number(name, value, expected, holds)


# ---- Values of tensors

# Function that checks a vector from its minimum, its maximum, and its least step from one element
# to the next. The step is valid only in a late check that was added with has_step=True. Minimum and
# maximum are NaN if a value is NaN. It returns an error message, or "" if all values are allowed.
Judge = Callable[[float, float, float], str]
# `add` reduces a vector of a late check with torch if it has more elements than this.
LARGE = 1 << 17


class ValueChecks:
    """The value checks of one call.

    `add` raises a ValueError if a check fails. On a GPU with `validate="auto"`, it only stores the
    vector. At the end of the call, `send` computes the numbers for all checks, and starts one copy
    of them to the host. If the call raises an error before `send`, the checks are dropped, because
    the call returns no result that could be wrong.

    Args:
        validate: "auto" or "full", as in `linear_grpo_loss`.
        backend: the backend of the call. With "torch", no Triton kernel is used.
    """

    def __init__(self, validate: str, backend: str = "auto") -> None:
        self.validate = validate
        self.backend = backend
        self.stored: list[tuple[Judge, Tensor]] = []

    def are_late(self, x: Tensor) -> bool:
        """Return whether a wrong value in x raises an error only in a later call.

        The kernels then use x before it is checked. The caller must clamp x, or pass it only to
        kernels that accept invalid values.
        """
        return x.is_cuda and self.validate == "auto"

    def add(self, judge: Judge, x: Tensor, *, has_step: bool = False) -> ValueChecks:
        """Check the values of a vector. It must not be empty, and must not change before `send`.

        Set `has_step` if the judge uses its third argument.
        """
        if self.are_late(x):
            # Reduce a large vector with torch, which uses the whole GPU. The kernel of `extremes`
            # uses one program. The vector can then be freed before `send`.
            is_large = x.numel() > LARGE and not has_step
            self.stored.append((judge, torch.stack(x.aminmax()) if is_large else x))
        elif not is_capturing(x):
            low, high = x.aminmax()
            if message := judge(low.item(), high.item(), 0.0):
                raise ValueError(message)
        return self

    def add_flag(self, is_wrong: Tensor, message: str) -> ValueChecks:
        """Check that a 0-d bool tensor is False. `message` is the error otherwise."""
        return self.add(lambda flag, *_: message if flag else "", is_wrong.reshape(1))

    def send(self) -> None:
        """Start to copy the stored checks to the host, where `raise_pending` judges them."""
        if not self.stored or is_capturing(self.stored[0][1]):
            return
        judges, vectors = zip(*self.stored, strict=True)
        # Copy all numbers in one tensor, because each copy takes the host about 10 us.
        late = LateChecks(judges, *copy_to_host_async(extremes(vectors, self.backend)))
        with _lock:
            _pending.append(late)
        # A second backward pass checks its logps with this object, too. That pass must not repeat
        # the checks that were already sent.
        self.stored = []


class LateChecks(NamedTuple):
    """Checks whose numbers are on their way to the host."""

    judges: Sequence[Judge]
    numbers: Tensor  # (checks, 3) fp64, the arguments of each judge, valid after `ready`
    ready: torch.cuda.Event

    def messages(self) -> list[str]:
        """Return the message of each check, or "" if it has not failed."""
        rows = self.numbers.tolist()
        return [judge(*row) for judge, row in zip(self.judges, rows, strict=True)]


def extremes(vectors: Sequence[Tensor], backend: str) -> Tensor:
    """Return the minimum, the maximum and the least step of each vector, (count, 3) fp64."""
    if uses_triton(vectors[0], backend):
        from grpo_fast.kernels.gpu import tokens as kernels

        return kernels.extremes(vectors)
    doubles = [x.double() for x in vectors]
    steps = [x.diff(append=x.new_tensor([math.inf])).amin() for x in doubles]
    ends = [(*x.aminmax(), step) for x, step in zip(doubles, steps, strict=True)]
    return torch.stack([torch.stack(x) for x in ends])


_pending: list[LateChecks] = []
_lock = threading.Lock()


def raise_pending() -> None:
    """Raise a ValueError if a value check of an earlier GPU call failed.

    Only checks whose results have been copied to the host are considered.
    """
    if not _pending or (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
        return
    with _lock:
        arrived = [x for x in _pending if x.ready.query()]
        _pending[:] = [x for x in _pending if not any(x is y for y in arrived)]
    text = "; ".join(dict.fromkeys(y for x in arrived for y in x.messages() if y))
    if text:
        raise ValueError(f"{text} (in an earlier call; validate='full' checks at once)")


def check_numbers(
    checks: ValueChecks, rules: Rules = RULES, **tensors: Tensor | None
) -> ValueChecks:
    """Check each tensor by the rule for its name. Tensors without a rule are not checked."""
    for name, x in tensors.items():
        if x is not None and x.numel() and name in rules:
            numbers = rules[name].convert(x)
            if numbers.dim() != 1 or numbers.dtype not in (torch.float32, torch.float64):
                numbers = numbers.reshape(-1).float()
            checks.add(partial(rules[name].judge, name, x if x.is_cpu else None), numbers)
    return checks


def checked_total(
    name: str, value: Total | None, device: torch.device, checks: ValueChecks
) -> Total | None:
    """Check the number of tokens or completions in an optimizer step, and return it.

    A tensor on the CPU is converted to a float. A tensor on a GPU is moved to `device`.
    """
    if not isinstance(value, Tensor):
        return value
    value = value.detach().reshape(())
    # Do not copy a number from the CPU to a GPU, because the copy costs a GPU sync.
    value = (value if value.is_cpu else value.to(device)).double()
    message = f"{name}: expected {TOTALS}, got "

    def judge(total: float, *_: float) -> str:
        return "" if LEAST_TOTAL <= total < math.inf else f"{message}{total}"

    checks.add(judge, value.reshape(1))
    return float(value) if value.is_cpu else value


def check_offsets(
    cu: Tensor, num_rows: int, checks: ValueChecks, name: str = "cu_seqlens", end: str = "T"
) -> None:
    """Check that offsets ascend from 0 to num_rows.

    Args:
        cu: (B+1,), int64 or int32. The offsets.
        num_rows: the expected last offset.
        checks: the checks of the call.
        name: name of the argument in the message.
        end: symbol for num_rows in the message, for example "T".
    """

    expected = f"{name}: expected non-decreasing offsets from 0 to {end} = {num_rows}, got "

    def judge(low: float, high: float, step: float) -> str:
        if low == 0 and high == num_rows and step >= 0:
            return ""
        descent = f", one of them {-step:.0f} less than the one before" if step < 0 else ""
        return f"{expected}offsets from {low:.0f} to {high:.0f}{descent}"

    if checks.are_late(cu):
        checks.add(judge, cu, has_step=True)
    elif not is_capturing(cu):
        offsets = cu.tolist()
        if offsets[0] == 0 and offsets[-1] == num_rows and offsets == sorted(offsets):
            return
        shown = offsets if len(offsets) <= 16 else [offsets[0], "...", offsets[-1]]
        raise ValueError(f"{expected}{shown}")


def checked_ids(
    name: str, x: Tensor, end: int, checks: ValueChecks, *, expected: str, kind: str = "ids"
) -> Tensor:
    """Check ids like `check_ids`, and return a copy.

    If the check is deferred, the copy is clamped to [0, end), because the kernels use ids as memory
    indices and run before the check.
    """
    check_ids(name, x, end, checks, expected=expected, kind=kind)
    return x.clamp(0, end - 1) if checks.are_late(x) else x.clone()


def check_ids(
    name: str, x: Tensor, end: int, checks: ValueChecks, *, expected: str, kind: str = "ids"
) -> None:
    """Check that ids are in [0, end).

    Args:
        name: name of the argument in the message.
        x: (T,), int64. The ids.
        end: upper bound, exclusive.
        checks: the checks of the call.
        expected: description of the allowed values in the message.
        kind: the word for the values in the message.
    """

    def judge(low: float, high: float, _: float) -> str:
        if 0 <= low and high < end:
            return ""
        hint = IGNORED_HINT if name == "target_ids" and low == IGNORED_TARGET else ""
        return f"{name}: expected {expected}, got {kind} from {low:.0f} to {high:.0f}{hint}"

    if x.numel():
        checks.add(judge, x)


def check_logps(x: Tensor, checks: ValueChecks, message: str = NO_FINITE_LOSS) -> None:
    """Check that no logp is -inf, because its loss would be infinite.

    This is the last check of a call, so it also starts to copy the stored numbers to the host.
    """
    if x.numel():
        checks.add(lambda low, *_: message if low == -math.inf else "", x)
    checks.send()
