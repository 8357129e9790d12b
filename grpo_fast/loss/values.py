"""Every refusal of a value: a ValueError that names the argument, what was expected and what came.

Values on the CPU, and all of them under `validate="full"`, are checked at once. On a GPU under
"auto" the next call that finds a flag on the host raises; meanwhile ids and offsets are clamped.
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
from grpo_fast.kernels.route import doors
from grpo_fast.kernels.support import Support, SupportRows, rows_of
from grpo_fast.kernels.workspace import on_its_way
from grpo_fast.objective.aggregation import Total

NO_FINITE_LOSS = "target_ids: expected targets of finite probability, got one whose logit is -inf"
NO_FINITE_LOGP = "logps: expected finite numbers at the active tokens, got -inf"
Check = tuple[Tensor, str]  # a 0-d bool, and what to say where it is set


# ---- when a value is looked at


class _Pending(NamedTuple):
    flags: Tensor  # (K,) bool on the host, valid once `ready`
    ready: torch.cuda.Event
    messages: tuple[str, ...]


_pending: list[_Pending] = []
_lock = threading.Lock()


def is_checked_later(x: Tensor, validate: str) -> bool:
    """Whether bad values of x are reported by a later call, so that this one computes with them."""
    return x.is_cuda and validate == "auto"


def raise_pending() -> None:
    """Raise what earlier calls on a GPU found wrong, all that has arrived."""
    if not _pending or (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
        return
    arrived: list[_Pending] = []
    waiting: list[_Pending] = []
    with _lock:
        for check in _pending:  # each is asked once: it may arrive at any time
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
    """A ValueError for the first flag that is set: at once, or when it has reached the host."""
    if not checks or is_capturing(checks[0][0]):
        return
    if is_checked_later(checks[0][0], validate):
        flags, messages = zip(*checks, strict=True)
        host, ready = on_its_way(torch.stack(flags))
        with _lock:
            _pending.append(_Pending(host, ready, messages))
        return
    for flag, message in checks:
        if flag:
            raise ValueError(message)


def value_check(x: Tensor, is_bad: Tensor, expected: str, on_device: str) -> Check:
    """A check for bad elements of x: the message names the first and how many there are; on a GPU,
    which is not waited for, it says `on_device`.
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
    return ~(x.abs() < torch.inf)  # two launches less than ~torch.isfinite(x); NaN < inf is False


# By argument: what is expected, what it is otherwise, and where that is. An infinite ref_logp has
# an infinite KL, whose gradient is finite.
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

# Where the package computes the logps from logits, the others must be log-probabilities, too. A
# caller of `grpo_loss` may have the log-densities of continuous actions, which may be positive.
ROUNDING = 1e-2  # nats by which a log-probability in 16 bits may exceed 0
_LOGPS = f"log-probabilities, at most 0 (or {ROUNDING}, by rounding), at the active tokens"
LOGPS_RULES = RULES | {
    "old_logps": (_LOGPS, "positive numbers, or NaN", lambda x: ~(x <= ROUNDING)),
    "ref_logps": (f"finite {_LOGPS}", "positive numbers, NaN or inf",
                  lambda x: ~(x <= ROUNDING) | (x == -torch.inf)),
    # NaN marks a token that the sampler did not score.
    "sampling_logps": (_LOGPS, "positive numbers", lambda x: x > ROUNDING),
}  # fmt: skip


def check_numbers(validate: str, rules: ValueRules = RULES, **tensors: object) -> None:
    """Refuse tensors of numbers that break the rule of their name; anything else is passed over."""
    checks = []
    for name, x in tensors.items():
        if isinstance(x, Tensor) and name in rules:
            expected, otherwise, is_bad = rules[name]
            checks.append(value_check(x, is_bad(x), f"{name}: expected {expected}", otherwise))
    check_values(checks, validate)


# ---- one kind of value each


def checked_total(name: str, value: Total | None, validate: str) -> Total | None:
    """A number > 0; on the host wherever it can be read there without a sync."""
    if not isinstance(value, Tensor):
        return value
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
    """cu_seqlens (B+1,) int64, from 0 to T; where the flag comes late, made to fit.

    It stays in [0, T] and never falls: lengths are >= 0, a search among the inner ones in [0, B).
    """
    message = f"{name}: expected non-decreasing offsets from 0 to {end} = {num_rows}"
    if cu.device.type == "cpu":
        message += f", got {cu.tolist() if len(cu) <= 16 else [int(cu[0]), '...', int(cu[-1])]}"
    falls = (cu[1:] < cu[:-1]).any()
    check_values([((cu[0] != 0) | (cu[-1] != num_rows) | falls, message)], validate)
    return cu.clamp(0, num_rows).cummax(0).values if is_checked_later(cu, validate) else cu


def checked_ids(
    name: str, x: Tensor, end: int, validate: str, *, expected: str, kind: str = "ids"
) -> Tensor:
    """x inside [0, end); clamped where the flag comes late."""
    if not x.numel():
        return x
    low, high = x.aminmax()
    message = f"{name}: expected {expected}"
    if x.device.type == "cpu":
        message += f", got {kind} from {low.item()} to {high.item()}"
    check_values([((low < 0) | (high >= end), message)], validate)
    return x.clamp(0, end - 1) if is_checked_later(x, validate) else x


def check_logps(x: Tensor, validate: str, message: str = NO_FINITE_LOSS) -> None:
    """Refuse a target whose logit is -inf: it has no finite loss."""
    if x.numel():
        check_values([(x.amin() == -torch.inf, message)], validate)


# ---- a caller's `Support` as rows for the kernels


def support_rows(
    support: Support,
    active_index: Tensor | None,  # (T,) int64: the active ones of the caller's targets; None: all
    target_ids: Tensor,  # (T,) int64 of the active ones
    vocab_size: int,
    validate: str,
) -> SupportRows | None:
    """The active rows that have a set, in memory of their own, or None; a GPU is waited for."""
    # 1. Where the set of each active row begins, and how many ids it has.
    count = len(support.ids)
    bounds = checked_offsets(support.offsets, count, validate, "support.offsets", "nnz")
    starts = bounds[:-1]
    lengths = bounds.diff()
    if active_index is not None:
        starts = starts[active_index]
        lengths = lengths[active_index]
    # 2. Split off the rows without a set, which have the whole vocabulary.
    has_set = lengths > 0
    count, total = _sizes(has_set, lengths)
    if count == 0:
        return None
    own = others = None
    if count < len(lengths):
        both = (has_set, count), (~has_set, len(lengths) - count)
        own, others = (torch.nonzero_static(x, size=n)[:, 0] for x, n in both)
        starts, lengths, target_ids = (x[own] for x in (starts, lengths, target_ids))
    # 3. Copy the ids of the rows that are left, one row after another.
    bounds = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    columns = support.ids.to(torch.int64, copy=True)
    if total < len(columns):  # what lies between the sets of the active rows is not looked at
        rows = rows_of(bounds, total)
        places = starts[rows] - bounds[rows] + torch.arange(total, device=columns.device)
        columns = columns[places]
    expected = f"ids in [0, {vocab_size}) in the rows of the active tokens"
    columns = checked_ids("support.ids", columns, vocab_size, validate, expected=expected)
    # 4. Find each target in its set.
    target_places = doors("support", "cpu" if columns.is_cpu else "torch").target_places
    places, repeated = target_places(columns, bounds, target_ids, vocab_size)
    _check_targets(target_ids, places, repeated, validate)
    if is_checked_later(places, validate):
        places = places.clamp(min=0)
    return SupportRows(own, others, columns, bounds, places)


def _sizes(has_set: Tensor, lengths: Tensor) -> tuple[int, int]:
    count, total = torch.stack([has_set.sum(), lengths.sum()]).tolist()
    return count, total


def _check_targets(target_ids: Tensor, places: Tensor, repeated: Tensor, validate: str) -> None:
    missing = (places < 0).any()
    twice = repeated >= 0
    one = "support: expected every active target among its own ids"
    other = "support.ids: expected no id twice in one row"
    if missing.device.type == "cpu" and missing:
        count = int((places < 0).sum())
        first = int(target_ids[places < 0][0])
        one += f", got {count} that are not, the first of them target id {first}"
    if twice.device.type == "cpu" and twice:
        other += f", got id {int(repeated)} twice"
    check_values([(missing, one), (twice, other)], validate)
