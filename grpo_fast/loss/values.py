"""Every refusal of a value: a ValueError that names the argument, what was expected and what came.

pending.py says when a value on a device is looked at.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from grpo_fast.loss.checks import wrong
from grpo_fast.loss.pending import Check, check_values, elements, told_late
from grpo_fast.objective.aggregation import Total

NO_FINITE_LOSS = "target_ids: expected targets of finite probability, got one whose logit is -inf"
NO_FINITE_LOGP = "logps: expected finite numbers at the active tokens, got -inf"


def total(name: str, value: Total | None, validate: str) -> Total | None:
    """A number > 0; on the host wherever it can be read there without a sync."""
    if not isinstance(value, Tensor):
        return value
    if value.is_cpu:
        found = float(value)
        if not 0 < found < math.inf:
            raise wrong(name, "a number > 0", found)
        return found
    bad = ~((value > 0) & torch.isfinite(value))
    check_values([(bad, f"{name}: expected a number > 0")], validate)
    return value.double()


def mask(x: Tensor, kept: Tensor, validate: str) -> None:
    """0 or 1 everywhere; kept: x != 0."""
    if x.dtype != torch.bool:
        expected = "completion_mask: expected only 0 and 1"
        check_values([elements(x, x != kept, expected, "other values")], validate)


def offsets(
    cu: Tensor, num_rows: int, validate: str, name: str = "cu_seqlens", end: str = "T"
) -> Tensor:
    """cu_seqlens (B+1,) int64, from 0 to T; where the flag comes late, made to fit.

    What is returned then stays in [0, T] and never falls: lengths are >= 0 and sum to at most T,
    and a search among the inner offsets ends in [0, B).
    """
    message = f"{name}: expected non-decreasing offsets from 0 to {end} = {num_rows}"
    if cu.device.type == "cpu":
        message += f", got {cu.tolist() if len(cu) <= 16 else [int(cu[0]), '...', int(cu[-1])]}"
    falls = (cu[1:] < cu[:-1]).any()
    check_values([((cu[0] != 0) | (cu[-1] != num_rows) | falls, message)], validate)
    return cu.clamp(0, num_rows).cummax(0).values if told_late(cu, validate) else cu


def ids(
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
    return x.clamp(0, end - 1) if told_late(x, validate) else x


def finite(name: str, x: Tensor, expected: str, odd: str) -> list[Check]:
    """No NaN or inf (odd = "NaN or inf"), or no NaN; a sum finds one in one operation."""
    if x.device.type == "cpu" and math.isfinite(x.sum().item()):
        return []
    found = x.isnan() if odd == "NaN" else ~torch.isfinite(x)
    return [elements(x, found, f"{name}: expected {expected}", odd)]


def temperatures(x: Tensor, where: str) -> list[Check]:
    bad = ~((x > 0) & torch.isfinite(x))
    return [elements(x, bad, f"temperature: expected finite numbers > 0{where}", "others")]


def logps(x: Tensor, validate: str, message: str = NO_FINITE_LOSS) -> None:
    """Refuse a target whose logit is -inf: it has no finite loss."""
    if x.numel():
        check_values([(x.amin() == -torch.inf, message)], validate)
