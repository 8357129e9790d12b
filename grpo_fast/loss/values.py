"""The allowed values of arguments, and checks that raise a ValueError for other values.

`value_checks.py` decides whether a check runs at once or after a GPU has computed the values.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from grpo_fast.loss.value_checks import ValueChecks
from grpo_fast.objective.aggregation import LEAST_TOTAL, Total

NO_FINITE_LOSS = "target_ids: expected targets of finite probability, got one whose logit is -inf"
NO_FINITE_LOGP = "logps: expected finite numbers at the active tokens, got -inf"
TOTALS = f"a number > 0 (at least {LEAST_TOTAL:g})"
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

    def judge(self, name: str, x: Tensor | None, low: float, high: float) -> str:
        """Return an error message if a converted value is not allowed, and "" if all are.

        Args:
            name: name of the argument.
            x: the values before `convert`. With them, the message contains the first wrong value
                and the number of wrong values. None on a GPU. The message then contains the text
                `self.otherwise` instead.
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
        hint = self.hint if high > self.high else ""
        return f"{name}: expected {self.expected}, got {got}{hint}"


LEAST = math.ulp(0.0)  # the least number > 0
Rules = dict[str, Rule]  # keyed by the name of the argument
# The rules of most functions. old_logps may be -inf, because the ratio is clamped. ref_logps must
# be finite, because the KL would otherwise be infinite.
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


def check_numbers(checks: ValueChecks, rules: Rules = RULES, **tensors: object) -> ValueChecks:
    """Check each tensor by the rule for its name.

    Arguments without a rule and arguments that are not tensors are not checked.
    """
    for name, x in tensors.items():
        if isinstance(x, Tensor) and x.numel() and name in rules:
            judge = partial(rules[name].judge, name, x if x.is_cpu else None)
            checks.add(judge, *rules[name].convert(x).aminmax())
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
    value = value if value.is_cpu else value.to(device)
    message = f"{name}: expected {TOTALS}, got "
    checks.add(lambda x: "" if LEAST_TOTAL <= x < math.inf else f"{message}{x}", value)
    return float(value) if value.is_cpu else value.double()


def checked_offsets(
    cu: Tensor, num_rows: int, checks: ValueChecks, name: str = "cu_seqlens", end: str = "T"
) -> Tensor:
    """Check that offsets ascend from 0 to num_rows, and return them.

    If the check is deferred, the returned offsets are forced to be ascending and in [0, num_rows],
    so that no length computed from wrong offsets is negative.

    Args:
        cu: (B+1,), int64. The offsets.
        num_rows: the expected last offset.
        checks: the checks of the call.
        name: name of the argument in the message.
        end: symbol for num_rows in the message, for example "T".

    Returns:
        The offsets, (B+1,), int64.
    """

    def judge(offsets: Tensor) -> str:
        first, last = int(offsets[0]), int(offsets[-1])
        if (first, last) == (0, num_rows) and bool((offsets[1:] >= offsets[:-1]).all()):
            return ""
        shown = offsets.tolist() if len(offsets) <= 16 else [first, "...", last]
        expected = f"non-decreasing offsets from 0 to {end} = {num_rows}"
        return f"{name}: expected {expected}, got {shown}"

    checks.add(judge, cu)
    return cu.clamp(0, num_rows).cummax(0).values if checks.are_late(cu) else cu


def checked_ids(
    name: str, x: Tensor, end: int, checks: ValueChecks, *, expected: str, kind: str = "ids"
) -> Tensor:
    """Check that ids are in [0, end), and return a copy.

    If the check is deferred, the copy is clamped to [0, end).

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
    # Clamp ids whose check is deferred, because the kernels use ids as memory indices and run
    # before the check.
    return x.clamp(0, end - 1) if checks.are_late(x) else x.clone()


def check_logps(x: Tensor, checks: ValueChecks, message: str = NO_FINITE_LOSS) -> None:
    """Check that no logp is -inf, because its loss would be infinite.

    This is the last check of a call, so it also starts to copy the stored numbers to the host.
    """
    if x.numel():
        checks.add(lambda low: message if low == -math.inf else "", x.amin())
    checks.send()
