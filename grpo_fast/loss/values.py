"""Checks of argument values. A failed check raises a ValueError that names the argument.

Values on the CPU are checked at once. With `validate="full"`, values on a GPU are also checked at
once. With `validate="auto"`, the checks on a GPU do not wait for the device: the numbers that they
need are copied to the host in the background, and the next call that finds a wrong number raises
the error. Until then, ids and offsets are clamped, so that no kernel reads out of bounds.
"""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from grpo_fast.kernels.gpu.capture import is_capturing
from grpo_fast.kernels.route import kernel_module
from grpo_fast.kernels.support import Support, SupportRows, rows_of
from grpo_fast.kernels.workspace import copy_to_host_async
from grpo_fast.objective.aggregation import Total

NO_FINITE_LOSS = "target_ids: expected targets of finite probability, got one whose logit is -inf"
NO_FINITE_LOGP = "logps: expected finite numbers at the active tokens, got -inf"
IGNORED_TARGET = -100
IGNORED_HINT = (
    f"; {IGNORED_TARGET} marks ignored labels in transformers: "
    f"pass completion_mask=(target_ids != {IGNORED_TARGET})"
)
# More offsets than this are compared on their device. For the 131073 offsets of a long support,
# Python would take 2.6 ms (Intel Xeon, family 6, model 167). For fewer, it takes at most 0.3 ms,
# and a GPU then launches three kernels fewer.
LONG = 1 << 14
# A function that checks numbers on the host, which are results of `Tensor.tolist`. It returns an
# error message, or "" if it allows the numbers.
Judge = Callable[..., str]


# ---- When a value is checked


class ValueChecks:
    """The value checks of one call.

    `add` raises a ValueError if a check fails. On a GPU with `validate="auto"`, it only stores the
    numbers, and `send` starts one copy of all stored numbers to the host.

    Args:
        validate: "auto" or "full", as in `linear_grpo_loss`.
    """

    numbers: Tensor  # uint8 on the host: the bytes of all stored numbers, valid after `ready`
    ready: torch.cuda.Event

    def __init__(self, validate: str) -> None:
        self.validate = validate
        self.kept: list[tuple[Judge, tuple[Tensor, ...]]] = []

    def are_late(self, x: Tensor) -> bool:
        """Return whether a later call reports the errors in x. The caller must then clamp x."""
        return x.is_cuda and self.validate == "auto"

    def add(self, judge: Judge, *tensors: Tensor) -> ValueChecks:
        """Check the numbers of tensors with `judge`. All tensors must be on one device."""
        if self.are_late(tensors[0]):
            self.kept.append((judge, tensors))
        elif not is_capturing(tensors[0]) and (message := judge(*(x.tolist() for x in tensors))):
            raise ValueError(message)
        return self

    def send(self) -> None:
        """Start the copy of the stored numbers, so that a later call raises the errors."""
        if not self.kept or is_capturing(self.kept[0][1][0]):
            return
        # Copy bytes, because the tensors have several dtypes. `view` needs a last stride of 1. Get
        # it by unsqueeze, because contiguous() keeps a larger stride of a single element.
        columns = [x.contiguous().unsqueeze(-1) for _, tensors in self.kept for x in tensors]
        parts = [x.view(torch.uint8).flatten() for x in columns]
        copied = parts[0] if len(parts) == 1 else torch.cat(parts)
        self.numbers, self.ready = copy_to_host_async(copied)
        with _lock:
            _pending.append(self)

    def messages(self) -> Iterator[str]:
        """Yield the message of each stored check, or "" if it has not failed."""
        sizes = [x.nbytes for _, tensors in self.kept for x in tensors]
        # Clone each part, because a view as a different dtype must start at a multiple of the
        # dtype's size.
        parts = (x.clone() for x in self.numbers.split(sizes))
        for judge, tensors in self.kept:
            yield judge(*(next(parts).view(x.dtype).view(x.shape).tolist() for x in tensors))


_pending: list[ValueChecks] = []
_lock = threading.Lock()


def raise_pending() -> None:
    """Raise a ValueError if wrong numbers of an earlier GPU call have reached the host."""
    if not _pending or (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
        return
    with _lock:
        arrived = [x for x in _pending if x.ready.query()]
        _pending[:] = [x for x in _pending if x not in arrived]
    text = "; ".join(dict.fromkeys(y for x in arrived for y in x.messages() if y))
    if text:
        raise ValueError(f"{text} (in an earlier call; validate='full' checks at once)")


def flag_check(message: str) -> Judge:
    """Return a function that reports the message if an error flag is set."""
    return lambda flag: message if flag else ""


class Rule(NamedTuple):
    """The allowed values of an argument. NaN is never allowed after `convert`."""

    expected: str  # description of the allowed values
    otherwise: str  # description of the other values, for a message about a GPU tensor
    low: float = -sys.float_info.max  # the least allowed value
    high: float = sys.float_info.max  # the greatest allowed value
    # Converts the values before they are compared with `low` and `high`.
    convert: Callable[[Tensor], Tensor] = lambda x: x

    def judge(self, name: str, x: Tensor | None, low: float, high: float) -> str:
        """Return an error message if a converted value is not allowed, otherwise "".

        Args:
            name: name of the argument.
            x: the values before `convert`. The message names the first bad value and the number of
                bad values. None on a GPU, where the message contains `otherwise`.
            low: the least value after `convert`, or NaN if a value is NaN.
            high: the greatest value after `convert`, or NaN if a value is NaN.
        """
        if self.low <= low and high <= self.high:
            return ""
        got = self.otherwise
        if x is not None:
            pairs = zip(x.tolist(), self.convert(x).tolist(), strict=True)
            bad = [value for value, number in pairs if not self.low <= number <= self.high]
            got = f"{bad[0]:g} ({len(bad)} of {x.numel()} values)"
        return f"{name}: expected {self.expected}, got {got}"


# Rules for the values of arguments, by name. old_logps may be -inf, because the ratio is clamped.
# ref_logps must be finite, because the KL would be infinite.
LEAST = math.ulp(0.0)  # the least number > 0
Rules = dict[str, Rule]
RULES: Rules = {
    "advantages": Rule("finite numbers", "NaN or inf"),
    "old_logps": Rule("numbers at the active tokens", "NaN", -math.inf, math.inf),
    "ref_logps": Rule("finite numbers at the active tokens", "NaN or inf"),
    "temperature": Rule("finite numbers > 0 at the active tokens", "others", LEAST),
    "weights": Rule("finite numbers", "NaN or inf"),
    # Compare instead of computing x·(x - 1), because torch has no arithmetic for float8 and uint16.
    "completion_mask": Rule("only 0 and 1", "other values", 0, 0, lambda x: (x != 0) & (x != 1)),
    "num_items_in_batch": Rule("numbers >= 0", "others", 0),
}

# `LOGPS_RULES` apply to the losses that compute logps from logits. There, old, reference and
# sampling logps are log-probabilities, so they may exceed 0 only by `ROUNDING`. `RULES` have no
# upper limit for logps, because `grpo_loss` also accepts log-densities of continuous actions, which
# may be positive.
ROUNDING = 1e-2  # nats above 0 that rounding to 16 bits may cause
_LOGPS = f"log-probabilities, at most 0 (or {ROUNDING}, by rounding), at the active tokens"
LOGPS_RULES = RULES | {
    "old_logps": Rule(_LOGPS, "positive numbers, or NaN", -math.inf, ROUNDING),
    "ref_logps": Rule(f"finite {_LOGPS}", "positive numbers, NaN or inf", high=ROUNDING),
    # Allow NaN, which marks a token without a logp from the sampler.
    "sampling_logps": Rule(_LOGPS, "positive numbers", -math.inf, ROUNDING, torch.nan_to_num),
}


def check_numbers(checks: ValueChecks, rules: Rules = RULES, **tensors: object) -> ValueChecks:
    """Check the values of each tensor by the rule that `rules` has for its name.

    Arguments without a rule and arguments that are not tensors are not checked.
    """
    for name, x in tensors.items():
        if isinstance(x, Tensor) and x.numel() and name in rules:
            judge = partial(rules[name].judge, name, x if x.is_cpu else None)
            checks.add(judge, *rules[name].convert(x).aminmax())
    return checks


# ---- Checks that return the value


def checked_total(
    name: str, value: Total | None, device: torch.device, checks: ValueChecks
) -> Total | None:
    """Check that a total is a number > 0, and return it.

    A tensor is moved to `device`. If this is the CPU, the tensor is converted to a float.
    """
    if not isinstance(value, Tensor):
        return value
    value = value.detach().reshape(()).to(device)
    message = f"{name}: expected a number > 0, got "
    checks.add(lambda number: "" if 0 < number < math.inf else f"{message}{number}", value)
    return float(value) if value.is_cpu else value.double()


def checked_offsets(
    cu: Tensor, num_rows: int, checks: ValueChecks, name: str = "cu_seqlens", end: str = "T"
) -> Tensor:
    """Check that offsets ascend from 0 to num_rows, and return them.

    On a GPU the offsets are clamped to be ascending and in [0, num_rows], so that no length
    computed from wrong offsets is negative.

    Args:
        cu: (B+1,), int64. The offsets.
        num_rows: the expected last offset.
        checks: the checks of the call.
        name: name of the argument in the message.
        end: symbol for num_rows in the message, for example "T".

    Returns:
        The offsets, (B+1,), int64.
    """

    def judge(offsets: list[int], falls: bool = False) -> str:
        is_sorted = not falls and offsets == sorted(offsets)
        if is_sorted and (offsets[0], offsets[-1]) == (0, num_rows):
            return ""
        shown = offsets if count <= 16 else [offsets[0], "...", offsets[-1]]
        expected = f"non-decreasing offsets from 0 to {end} = {num_rows}"
        return f"{name}: expected {expected}, got {shown}"

    count = len(cu)
    if count > LONG:
        # The slice contains the first and the last offset.
        checks.add(judge, cu[:: count - 1], (cu[1:] < cu[:-1]).any())
    else:
        checks.add(judge, cu)
    # cummax makes the offsets ascending, so that no length is negative.
    return cu.clamp(0, num_rows).cummax(0).values if checks.are_late(cu) else cu


def checked_ids(
    name: str, x: Tensor, end: int, checks: ValueChecks, *, expected: str, kind: str = "ids"
) -> Tensor:
    """Check that ids are in [0, end), and return a copy, which is clamped if the check is late.

    Args:
        name: name of the argument in the message.
        x: (T,), int64. The ids.
        end: upper bound, exclusive.
        checks: the checks of the call.
        expected: description of the allowed values in the message.
        kind: the word for the values in the message.
    """
    if not x.numel():
        return x

    def judge(low: int, high: int) -> str:
        if 0 <= low and high < end:
            return ""
        hint = IGNORED_HINT if name == "target_ids" and low == IGNORED_TARGET else ""
        return f"{name}: expected {expected}, got {kind} from {low} to {high}{hint}"

    checks.add(judge, *x.aminmax())
    # Clamp ids on a GPU, because the kernels use them as memory indices and may run before the
    # error is raised.
    return x.clamp(0, end - 1) if checks.are_late(x) else x.clone()


def check_logps(x: Tensor, validate: str, message: str = NO_FINITE_LOSS) -> None:
    """Raise an error if a target has logit -inf, because its loss would be infinite."""
    if x.numel():
        checks = ValueChecks(validate)
        checks.add(lambda low: message if low == -math.inf else "", x.amin()).send()


# ---- Conversion of a `Support` into rows for the kernels


def support_rows(
    support: Support,
    active_index: Tensor | None,  # (T,) int64, None: all
    target_ids: Tensor,  # (T,) int64
    vocab_size: int,
    checks: ValueChecks,
) -> SupportRows | None:
    """Convert a `Support` to the form that the kernels expect.

    Rows with an empty set use the full vocabulary. If all active rows do, the result is None. The
    host must know the total size of all sets, which costs a GPU sync.

    Args:
        support: one set of ids for each target of the caller.
        active_index: (T,), int64. Positions of the active targets. None if all targets are active.
        target_ids: (T,), int64. The active targets.
        vocab_size: V.
        checks: the checks of the call.
    """
    # 1. Find the start and the size of the set of each active row.
    count = len(support.ids)
    bounds = checked_offsets(support.offsets, count, checks, "support.offsets", "nnz")
    starts = bounds[:-1]
    lengths = bounds.diff()
    if active_index is not None:
        starts = starts[active_index]
        lengths = lengths[active_index]
    # 2. Separate the rows without a set, which use the full vocabulary.
    has_set = lengths > 0
    count, total = _sizes(has_set, lengths)
    if count == 0:
        return None
    own_rows = other_rows = None
    if count < len(lengths):
        # Use nonzero_static() with the known number of sets. nonzero() would cost a second sync.
        own_rows = torch.nonzero_static(has_set, size=count)[:, 0]
        other_rows = torch.nonzero_static(~has_set, size=len(lengths) - count)[:, 0]
        starts = starts[own_rows]
        lengths = lengths[own_rows]
        target_ids = target_ids[own_rows]
    # 3. Copy the ids of the remaining rows into one vector.
    bounds = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    columns = support.ids.long()
    if total < len(columns):  # skip the sets of inactive rows
        rows = rows_of(bounds, total)
        places = starts[rows] - bounds[rows] + torch.arange(total, device=columns.device)
        columns = columns[places]
    expected = f"ids in [0, {vocab_size}) in the rows of the active tokens"
    columns = checked_ids("support.ids", columns, vocab_size, checks, expected=expected)
    # 4. Find the position of each target in its set.
    target_places = kernel_module("support", "cpu" if columns.is_cpu else "torch").target_places
    places, repeated = target_places(columns, bounds, target_ids, vocab_size)
    _check_targets(target_ids, places, repeated, checks)
    if checks.are_late(places):
        places = places.clamp(min=0)
    return SupportRows(own_rows, other_rows, columns, bounds, places)


def _sizes(has_set: Tensor, lengths: Tensor) -> tuple[int, int]:
    """Return the number of rows with a set, and the total size of all sets.

    benchmarks/gpu/recorder.py replaces this function, because fake tensors have no values.
    """
    # Copy both numbers to the host at once, which costs one GPU sync instead of two.
    count, total = torch.stack([has_set.sum(), lengths.sum()]).tolist()
    return count, total


def _check_targets(ids: Tensor, places: Tensor, repeated: Tensor, checks: ValueChecks) -> None:
    missing = places < 0
    absent = "support: expected every active target among the ids of its set"
    if places.is_cpu and missing.any():
        first = int(ids[missing][0])
        absent += f", got {int(missing.sum())} that are not, the first of them target id {first}"
    checks.add(flag_check(absent), missing.any())
    twice = "support.ids: expected no id twice in one row, got id"
    checks.add(lambda number: "" if number < 0 else f"{twice} {number} twice", repeated)
