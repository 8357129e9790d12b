"""From a caller's tensors in either layout to the T active tokens of one flat batch.

Both layouts arrive here as N flat rows with `cu_seqlens`; what the mask switches off is gathered away, so that
whatever a masked slot holds can reach nothing.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from grpo_fast import validation
from grpo_fast.aggregation import AGGREGATIONS, Total, completion_weights, denominator
from grpo_fast.config import LossConfig
from grpo_fast.kernels.capture import refuse
from grpo_fast.kernels.half_range import weight_unit
from grpo_fast.kernels.rows_torch import LogitRule
from grpo_fast.kernels.tokens import GatheredTokens, TokenBatch

NO_FINITE_LOSS = "target_ids: expected targets of finite probability, got one whose logit is -inf"


class TokenInputs(NamedTuple):
    """Everything per token or per completion, flat: N = B·L rows for the padded layout, T for the packed one."""

    target_ids: Tensor | None  # (N,)
    advantages: Tensor  # (B,) or (N,)
    cu_seqlens: Tensor | None  # (B+1,); None: B completions of N/B rows each
    num_completions: int  # B
    completion_mask: Tensor | None  # (N,)
    old_logps: Tensor | None  # (N,)
    ref_logps: Tensor | None  # (N,)
    sampling_logps: Tensor | None  # (N,)
    temperature: Tensor | None  # (N,)
    num_items_in_batch: Total | None  # a number, or 0-d
    num_completions_in_batch: Total | None  # a number, or 0-d


class ActiveTokens(NamedTuple):
    """The T tokens that count, and how they lie among the N rows."""

    num_rows: int  # N
    rows: Tensor | None  # (T,) rows of the active tokens; None when all N are active
    target_ids: Tensor | None  # (T,) int64, inside [0, V)
    batch: TokenBatch
    rule: LogitRule

    def in_range(self) -> ActiveTokens:
        """The same batch with weights of at most 1, and the power of two that made them so."""
        return self._replace(batch=self.batch.scaled(weight_unit(self.batch.weights)))

    def active(self, x: Tensor) -> Tensor:
        """(N,) → (T,)."""
        return x if self.rows is None else x.index_select(0, self.rows)

    def to_rows(self, x: Tensor, fill: int = 0) -> Tensor:
        """(T,) → (N,), `fill` where a row is not active."""
        return x if self.rows is None else x.new_full((self.num_rows,), fill).index_copy_(0, self.rows, x)


def active_tokens(
    inputs: TokenInputs, num_rows: int, vocab_size: int | None, config: LossConfig, validate: str
) -> ActiveTokens:
    """Gather the active tokens and check every value that was not checked on the host."""
    items, total, by_length = totals(inputs, config, validate)
    found = _gathered(inputs, num_rows, vocab_size, total, by_length, validate)
    batch = TokenBatch(
        advantages=found.advantages,
        weights=found.weights,
        entropy_weight=None if items is None else 1.0 / items,
        lengths=found.lengths,
        segments=found.segments,
        old_logps=found.old_logps,
        ref_logps=found.ref_logps,
        sampling_logps=found.sampling_logps,
    )
    temperature = config.temperature if found.temperature is None else found.temperature
    rule = LogitRule(config.logit_scale, config.softcap, temperature)
    return ActiveTokens(num_rows, found.rows, found.target_ids, batch, rule)


def totals(inputs: TokenInputs, config: LossConfig, validate: str) -> tuple[Total | None, Total | None, bool]:
    """Checked num_items_in_batch; what the weights divide by, None for the call's own tokens; and whether by length."""
    items = _checked_total("num_items_in_batch", inputs.num_items_in_batch, validate)
    completions = _checked_total("num_completions_in_batch", inputs.num_completions_in_batch, validate)
    total = denominator(
        str(config.aggregation),
        inputs.num_completions,
        max_completion_length=config.max_completion_length,
        num_items_in_batch=items,
        num_completions_in_batch=completions,
    )
    return items, total, AGGREGATIONS[str(config.aggregation)].by_length


def _gathered(
    inputs: TokenInputs, num_rows: int, vocab_size: int | None, total: Total | None, by_length: bool, validate: str
) -> GatheredTokens:
    index = _active_index(inputs.completion_mask, num_rows, validate)
    lengths, segments = _segments(inputs, num_rows, validate)
    if index is not None:
        segments = segments.index_select(0, index)
        lengths = torch.bincount(segments, minlength=inputs.num_completions)

    def gather(x: Tensor | None) -> Tensor | None:
        if x is None:
            return None
        return (x if index is None else x.index_select(0, index)).float()

    per_completion = inputs.advantages.shape[0] == inputs.num_completions
    advantages = inputs.advantages.float()[segments] if per_completion else gather(inputs.advantages)
    targets = inputs.target_ids
    if targets is not None:
        targets = (targets if index is None else targets.index_select(0, index)).long()
    old, ref, sampling = gather(inputs.old_logps), gather(inputs.ref_logps), gather(inputs.sampling_logps)
    weights = completion_weights(lengths, max(segments.shape[0], 1) if total is None else total, by_length)[segments]
    found = GatheredTokens(
        lengths, segments, advantages, weights, index, targets, old, ref, sampling, gather(inputs.temperature)
    )
    validation.check_values(_value_checks(found, vocab_size), validate)
    if targets is not None and targets.is_cuda and vocab_size:
        found = found._replace(target_ids=targets.clamp(0, vocab_size - 1))
    return found


def _active_index(mask: Tensor | None, num_rows: int, validate: str) -> Tensor | None:
    """(T,) rows that the mask keeps; None when it keeps all."""
    if mask is None:
        return None
    refuse("completion_mask", mask, mask)
    kept = mask if mask.dtype == torch.bool else mask != 0
    if mask.dtype != torch.bool:
        check = validation.elements(mask, mask != kept, "completion_mask: expected only 0 and 1", "other values")
        validation.check_values([check], validate)
    index = kept.nonzero().squeeze(1)
    return None if index.shape[0] == num_rows else index


def _segments(inputs: TokenInputs, num_rows: int, validate: str) -> tuple[Tensor, Tensor]:
    """(B,) rows of every completion and (N,) the completion of every row."""
    device, count = inputs.advantages.device, inputs.num_completions
    if inputs.cu_seqlens is None:
        length = num_rows // max(count, 1)
        lengths = torch.full((count,), length, dtype=torch.int64, device=device)
        return lengths, torch.arange(count, device=device).repeat_interleave(length)
    cu = inputs.cu_seqlens.long()
    lengths = cu.diff()
    validation.check_values(_cu_checks(cu, lengths, num_rows), validate)
    return lengths, torch.arange(count, device=device).repeat_interleave(lengths, output_size=num_rows)


def _cu_checks(cu: Tensor, lengths: Tensor, num_rows: int) -> list[tuple[Tensor, str]]:
    message = f"cu_seqlens: expected non-decreasing offsets from 0 to T = {num_rows}"
    if cu.device.type == "cpu":
        message += f", got {cu.tolist() if cu.numel() <= 16 else [cu[0].item(), '...', cu[-1].item()]}"
    return [((cu[0] != 0) | (cu[-1] != num_rows) | (lengths < 0).any(), message)]


def _value_checks(found: GatheredTokens, vocab_size: int | None) -> list[tuple[Tensor, str]]:
    """One flag and one sentence for everything that only the values can tell.

    A sum finds a NaN or inf in one operation; only when it does is every element looked at.
    """
    on_host = found.advantages.device.type == "cpu"
    checks = []
    if not (on_host and math.isfinite(found.advantages.sum().item())):
        odd = ~torch.isfinite(found.advantages)
        checks.append(validation.elements(found.advantages, odd, "advantages: expected finite numbers", "NaN or inf"))
    for name in ("old_logps", "ref_logps"):
        values = getattr(found, name)
        if values is not None and not (on_host and math.isfinite(values.sum().item())):
            expected = f"{name}: expected numbers at the active tokens"
            checks.append(validation.elements(values, values.isnan(), expected, "NaN"))
    targets, temperature = found.target_ids, found.temperature
    if targets is not None and targets.numel():
        low, high = targets.aminmax()
        message = f"target_ids: expected ids in [0, {vocab_size}) at the active tokens"
        if not on_host:
            checks.append(((low < 0) | (high >= vocab_size), message))
        elif low.item() < 0 or high.item() >= (vocab_size or 0):
            raise ValueError(f"{message}, got ids from {low.item()} to {high.item()}")
    if temperature is not None:
        bad = ~((temperature > 0) & torch.isfinite(temperature))
        expected = "temperature: expected finite numbers > 0 at the active tokens"
        checks.append(validation.elements(temperature, bad, expected, "others"))
    return checks


def _checked_total(name: str, value: Total | None, validate: str) -> Total | None:
    """A number > 0; on the host wherever it can be read there without a sync."""
    if not isinstance(value, Tensor):
        return value
    if value.is_cpu:
        number = float(value)
        if not 0 < number < math.inf:
            raise ValueError(f"{name}: expected a number > 0, got {number}")
        return number
    bad = ~((value > 0) & torch.isfinite(value))
    validation.check_values([(bad, f"{name}: expected a number > 0")], validate)
    return value.double()


def checked_rows(hidden_rows: Tensor, num_hidden: int, validate: str) -> Tensor:
    """(T,) the rows of hidden that the active tokens name, inside [0, num_hidden)."""
    if not hidden_rows.numel():
        return hidden_rows
    low, high = hidden_rows.aminmax()
    message = f"hidden_rows: expected rows in [0, {num_hidden}) at the active tokens"
    if hidden_rows.device.type == "cpu":
        message += f", got rows from {low.item()} to {high.item()}"
    validation.check_values([((low < 0) | (high >= num_hidden), message)], validate)
    return hidden_rows.clamp(0, num_hidden - 1) if hidden_rows.is_cuda else hidden_rows


def check_logps(logps: Tensor, validate: str, message: str = NO_FINITE_LOSS) -> None:
    """Refuse a target whose logit is -inf: it has no finite loss."""
    if logps.is_cpu:
        check_least_logp(logps.amin().item() if logps.numel() else 0.0, message)
    elif logps.numel():
        validation.check_values([(logps.amin() == -torch.inf, message)], validate)


def check_least_logp(least: float, message: str = NO_FINITE_LOSS) -> None:
    if least == -math.inf:
        raise ValueError(message)
