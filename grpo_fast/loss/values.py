"""Checks of argument values. A failed check raises a ValueError that names the argument.

Values on the CPU are checked at once. With `validate="full"`, values on a GPU are also checked at
once. With `validate="auto"`, the checks on a GPU do not wait for the device: their error flags are
copied to the host in the background, and the next call that finds a flag raises the error. Until
then, ids and offsets are clamped, so that no kernel reads out of bounds.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from grpo_fast.errors import argument_error
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
Check = tuple[Tensor, str]  # 0-d bool that is set on an error, and the message


# ---- When a value is checked


class _Pending(NamedTuple):
    """The checks of one GPU call, whose error flags are being copied to the host."""

    flags: Tensor  # (K,) bool on the host, valid after `ready`
    ready: torch.cuda.Event
    messages: tuple[str, ...]


_pending: list[_Pending] = []
_lock = threading.Lock()


def is_checked_later(x: Tensor, validate: str) -> bool:
    """Return whether a later call reports the errors in x. The caller must then clamp x."""
    return x.is_cuda and validate == "auto"


def raise_pending() -> None:
    """Raise a ValueError if an error flag of an earlier GPU call has reached the host."""
    if not _pending or (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
        return
    arrived: list[_Pending] = []
    waiting: list[_Pending] = []
    with _lock:
        for check in _pending:  # query once: the flag may arrive between two queries
            (arrived if check.ready.query() else waiting).append(check)
        _pending[:] = waiting
    messages = [
        message
        for check in arrived
        for flag, message in zip(check.flags.tolist(), check.messages, strict=True)
        if flag
    ]
    if messages:
        text = "; ".join(dict.fromkeys(messages))
        raise ValueError(f"{text} (in an earlier call; validate='full' checks at once)")


def check_values(checks: list[Check], validate: str) -> None:
    """Raise a ValueError for the first check whose error flag is set.

    Error flags on a GPU are queued for a later call, unless `validate` is "full".
    """
    if not checks or is_capturing(checks[0][0]):
        return
    if is_checked_later(checks[0][0], validate):
        flags, messages = zip(*checks, strict=True)
        host, ready = copy_to_host_async(torch.stack(flags))
        with _lock:
            _pending.append(_Pending(host, ready, messages))
        return
    for flag, message in checks:
        if flag:
            raise ValueError(message)


def value_check(x: Tensor, is_bad: Tensor, expected: str, on_device: str) -> Check:
    """Return a check that fails if an element of x is not allowed.

    On the CPU, the message names the first bad value and the number of bad values. Reading them
    from a GPU would cost a sync, so the message for a GPU tensor contains `on_device` instead.

    Args:
        x: the values.
        is_bad: the shape of x, bool. The elements that are not allowed.
        expected: start of the message, which ends with the allowed values.
        on_device: description of the bad values for a message about a GPU tensor.
    """
    flag = is_bad.any()
    if x.device.type != "cpu" or not flag:
        return flag, f"{expected}, got {on_device}"
    count = int(is_bad.sum())
    first = x[is_bad][0].item()
    return flag, f"{expected}, got {first:g} ({count} of {x.numel()} values)"


def is_positive(x: Tensor) -> Tensor:
    return (x > 0) & torch.isfinite(x)


def is_not_finite(x: Tensor) -> Tensor:
    # Compare with inf instead of calling ~torch.isfinite(x), which needs two more kernel launches.
    # NaN < inf is False, so NaN counts as bad, too.
    return ~(x.abs() < torch.inf)


# Rules for the values of arguments, by name. Each rule contains a description of the expected
# values, a description of bad values, and a function that finds bad values. old_logps may be -inf,
# because the ratio is clamped. ref_logps must be finite, because the KL would be infinite.
ValueRules = dict[str, tuple[str, str, Callable[[Tensor], Tensor]]]
RULES: ValueRules = {
    "advantages": ("finite numbers", "NaN or inf", is_not_finite),
    "old_logps": ("numbers at the active tokens", "NaN", torch.isnan),
    "ref_logps": ("finite numbers at the active tokens", "NaN or inf", is_not_finite),
    "temperature": ("finite numbers > 0 at the active tokens", "others", lambda x: ~is_positive(x)),
    "weights": ("finite numbers", "NaN or inf", is_not_finite),
    "completion_mask": ("only 0 and 1", "other values", lambda x: (x != 0) & (x != 1)),
    "num_items_in_batch": ("numbers >= 0", "others", lambda x: ~((x >= 0) & torch.isfinite(x))),
}

# `LOGPS_RULES` apply to the losses that compute logps from logits. There, old, reference and
# sampling logps are log-probabilities, so they may exceed 0 only by `ROUNDING`. `RULES` have no
# upper limit for logps, because `grpo_loss` also accepts log-densities of continuous actions, which
# may be positive.
ROUNDING = 1e-2  # nats above 0 that rounding to 16 bits may cause
_LOGPS = f"log-probabilities, at most 0 (or {ROUNDING}, by rounding), at the active tokens"
LOGPS_RULES = RULES | {
    "old_logps": (_LOGPS, "positive numbers, or NaN", lambda x: ~(x <= ROUNDING)),
    "ref_logps": (f"finite {_LOGPS}", "positive numbers, NaN or inf",
                  lambda x: ~(x <= ROUNDING) | (x == -torch.inf)),
    # Allow NaN, which marks a token without a logp from the sampler.
    "sampling_logps": (_LOGPS, "positive numbers", lambda x: x > ROUNDING),
}  # fmt: skip


def check_numbers(validate: str, rules: ValueRules = RULES, **tensors: object) -> None:
    """Check the values of each tensor by the rule that `rules` has for its name.

    Arguments without a rule and arguments that are not tensors are not checked.
    """
    checks = []
    for name, x in tensors.items():
        if isinstance(x, Tensor) and name in rules:
            expected, otherwise, is_bad = rules[name]
            checks.append(value_check(x, is_bad(x), f"{name}: expected {expected}", otherwise))
    check_values(checks, validate)


# ---- Checks that return the value


def checked_total(
    name: str, value: Total | None, device: torch.device, validate: str
) -> Total | None:
    """Check that a total is a number > 0, and return it.

    A tensor is moved to `device`. If this is the CPU, the tensor is converted to a float.
    """
    if not isinstance(value, Tensor):
        return value
    value = value.detach().reshape(()).to(device)
    if value.is_cpu:
        number = float(value)
        if not 0 < number < math.inf:
            raise argument_error(name, "a number > 0", number)
        return number
    check_values([(~is_positive(value), f"{name}: expected a number > 0")], validate)
    return value.double()


def checked_offsets(
    cu: Tensor, num_rows: int, validate: str, name: str = "cu_seqlens", end: str = "T"
) -> Tensor:
    """Check that offsets ascend from 0 to num_rows, and return them.

    On a GPU the offsets are clamped to be ascending and in [0, num_rows], so that no length
    computed from wrong offsets is negative.

    Args:
        cu: (B+1,), int64. The offsets.
        num_rows: the expected last offset.
        validate: "auto" or "full", as in `linear_grpo_loss`.
        name: name of the argument in the message.
        end: symbol for num_rows in the message, for example "T".

    Returns:
        The offsets, (B+1,), int64.
    """
    message = f"{name}: expected non-decreasing offsets from 0 to {end} = {num_rows}"
    if cu.device.type == "cpu":
        message += f", got {cu.tolist() if len(cu) <= 16 else [int(cu[0]), '...', int(cu[-1])]}"
    falls = (cu[1:] < cu[:-1]).any()
    check_values([((cu[0] != 0) | (cu[-1] != num_rows) | falls, message)], validate)
    # cummax makes the offsets ascending, so that no length is negative.
    return cu.clamp(0, num_rows).cummax(0).values if is_checked_later(cu, validate) else cu


def checked_ids(
    name: str, x: Tensor, end: int, validate: str, *, expected: str, kind: str = "ids"
) -> Tensor:
    """Check that ids are in [0, end), and return them. On a GPU they are clamped to this range.

    Args:
        name: name of the argument in the message.
        x: (T,), int64. The ids.
        end: upper bound, exclusive.
        validate: "auto" or "full".
        expected: description of the allowed values in the message.
        kind: the word for the values in the message.
    """
    if not x.numel():
        return x
    low, high = x.aminmax()
    message = f"{name}: expected {expected}"
    if x.device.type == "cpu":
        message += f", got {kind} from {low.item()} to {high.item()}"
        if name == "target_ids" and low == IGNORED_TARGET:
            message += IGNORED_HINT
    check_values([((low < 0) | (high >= end), message)], validate)
    # Clamp ids on a GPU, because the kernels use them as memory indices and may run before the
    # error is raised.
    return x.clamp(0, end - 1) if is_checked_later(x, validate) else x


def check_logps(x: Tensor, validate: str, message: str = NO_FINITE_LOSS) -> None:
    """Raise an error if a target has logit -inf, because its loss would be infinite."""
    if x.numel():
        check_values([(x.amin() == -torch.inf, message)], validate)


# ---- Conversion of a `Support` into rows for the kernels


def support_rows(
    support: Support,
    active_index: Tensor | None,  # (T,) int64, None: all
    target_ids: Tensor,  # (T,) int64
    vocab_size: int,
    validate: str,
) -> SupportRows | None:
    """Convert a `Support` to the form that the kernels expect.

    Rows with an empty set use the full vocabulary. If all active rows do, the result is None. The
    host must know the total size of all sets, which costs a GPU sync.

    Args:
        support: one set of ids for each target of the caller.
        active_index: (T,), int64. Positions of the active targets. None if all targets are active.
        target_ids: (T,), int64. The active targets.
        vocab_size: V.
        validate: "auto" or "full".
    """
    # 1. Find the start and the size of the set of each active row.
    count = len(support.ids)
    bounds = checked_offsets(support.offsets, count, validate, "support.offsets", "nnz")
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
    columns = support.ids.to(torch.int64, copy=True)
    if total < len(columns):  # skip the sets of inactive rows
        rows = rows_of(bounds, total)
        places = starts[rows] - bounds[rows] + torch.arange(total, device=columns.device)
        columns = columns[places]
    expected = f"ids in [0, {vocab_size}) in the rows of the active tokens"
    columns = checked_ids("support.ids", columns, vocab_size, validate, expected=expected)
    # 4. Find the position of each target in its set.
    target_places = kernel_module("support", "cpu" if columns.is_cpu else "torch").target_places
    places, repeated = target_places(columns, bounds, target_ids, vocab_size)
    _check_targets(target_ids, places, repeated, validate)
    if is_checked_later(places, validate):
        places = places.clamp(min=0)
    return SupportRows(own_rows, other_rows, columns, bounds, places)


def _sizes(has_set: Tensor, lengths: Tensor) -> tuple[int, int]:
    """Return the number of rows with a set, and the total size of all sets.

    benchmarks/gpu/recorder.py replaces this function, because fake tensors have no values.
    """
    # Copy both numbers to the host at once, which costs one GPU sync instead of two.
    count, total = torch.stack([has_set.sum(), lengths.sum()]).tolist()
    return count, total


def _check_targets(target_ids: Tensor, places: Tensor, repeated: Tensor, validate: str) -> None:
    missing = (places < 0).any()
    twice = repeated >= 0
    absent = "support: expected every active target among the ids of its set"
    duplicate = "support.ids: expected no id twice in one row"
    if missing.device.type == "cpu" and missing:
        count = int((places < 0).sum())
        first = int(target_ids[places < 0][0])
        absent += f", got {count} that are not, the first of them target id {first}"
    if twice.device.type == "cpu" and twice:
        duplicate += f", got id {int(repeated)} twice"
    check_values([(missing, absent), (twice, duplicate)], validate)
