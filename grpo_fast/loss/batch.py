"""`TokenBatch`: a caller's arguments, checked and flat, as the one object that travels through a call.

Both layouts become T active rows with their completion; what the mask switches off is gathered away, so that whatever a
masked slot holds can reach nothing. A batch shares no memory with what the caller passed per token: its metrics are
computed when somebody reads them, and by then the caller may have reused the buffers.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from grpo_fast.kernels.gpu.capture import is_capturing, refuse
from grpo_fast.kernels.head.half_range import weight_unit
from grpo_fast.kernels.types import ActiveRows, LogitRule
from grpo_fast.loss import checks
from grpo_fast.loss.pending import check_values
from grpo_fast.objective.aggregation import AGGREGATIONS, Total, completion_weights, denominator
from grpo_fast.objective.coefficients import Tokens
from grpo_fast.objective.config import LossConfig
from grpo_fast.objective.metrics import token_metrics


class TokenBatch(NamedTuple):
    """T active tokens of a batch: which rows they are, what the objective knows of them, and the objective."""

    rows: ActiveRows
    tokens: Tokens
    config: LossConfig

    @classmethod
    def build(
        cls,
        like: Tensor,  # (B, L) or (T,): target_ids, or logps where there are none
        advantages: Tensor,  # (B,) or the shape of like
        config: LossConfig,
        *,
        vocab_size: int | None = None,
        hidden_rows: Tensor | None = None,
        num_hidden: int = 0,
        completion_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        old_logps: Tensor | None = None,
        ref_logps: Tensor | None = None,
        sampling_logps: Tensor | None = None,
        num_items_in_batch: Total | None = None,
        num_completions_in_batch: Total | None = None,
        validate: str = "auto",
    ) -> TokenBatch:
        """From arguments that checks.py has seen: values are checked here.

        Args:
            vocab_size: V, where `like` holds target ids.
            hidden_rows, num_hidden: the row of hidden, of so many, that predicts each target.
            validate: "auto" or "full", as in `linear_grpo_loss`.

        Raises:
            ValueError: naming the argument, what was expected and what came.
        """
        num_completions = like.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        index = _active_index(completion_mask, validate)
        lengths, segments = _segments(like, cu_seqlens, num_completions, validate)
        if index is not None:
            segments = segments.index_select(0, index)
            lengths = torch.bincount(segments, minlength=num_completions)

        def owned(x: Tensor | None) -> Tensor | None:
            if x is None:
                return None
            x = x.detach().reshape(-1)
            return x.to(torch.float32, copy=True) if index is None else x.index_select(0, index).float()

        per_completion = advantages.dim() == 1 and advantages.shape[0] == num_completions
        values = advantages.detach().float()[segments] if per_completion else owned(advantages)
        old, ref, sampling = owned(old_logps), owned(ref_logps), owned(sampling_logps)
        weights, entropy_weight = _weights(
            lengths, segments, config, num_completions, num_items_in_batch, num_completions_in_batch, validate
        )
        assert values is not None
        tokens = Tokens(values, weights, entropy_weight, lengths, segments, old, ref, sampling)
        by_row = config.temperature if vocab_size is not None and isinstance(config.temperature, Tensor) else None
        temperatures = owned(by_row)
        _check(tokens, temperatures, validate)
        rule = LogitRule(config.logit_scale, config.softcap, config.temperature if by_row is None else temperatures)
        targets, rows_of_hidden = segments, None
        if vocab_size is not None:
            targets = _picked(like, index)
            expected = f"ids in [0, {vocab_size}) at the active tokens"
            targets = checks.ids("target_ids", targets, vocab_size, validate, expected=expected)
        if hidden_rows is not None:
            rows_of_hidden = _hidden_index(hidden_rows, index, num_hidden, validate)
        is_gathered = hidden_rows is not None or index is None
        rows = ActiveRows(
            like.numel(), index, targets, rule, rows_of_hidden if is_gathered else index, hidden_rows is not None
        )
        return cls(rows, tokens, config)

    def in_range(self) -> TokenBatch:
        """The same batch with weights of at most 1, and the power of two that made them so."""
        return self._replace(tokens=self.tokens.scaled(weight_unit(self.tokens.token_weights)))

    def metrics(self, logps: Tensor, entropy: Tensor | None) -> dict[str, Tensor]:
        """0-d metrics by TRL's names of a call that gave these logps and entropies, (N,) each."""
        logps, entropy = self.rows.active(logps), None if entropy is None else self.rows.active(entropy)
        return token_metrics(logps, entropy, self.tokens, self.config, self.rows.num_rows)


def rows_of_targets(
    target_ids: Tensor,  # (B, L) or (T,), -100: no target
    rule: LogitRule,  # temperature: a float, or the shape of target_ids
    vocab_size: int,
    hidden_rows: Tensor | None = None,
    num_hidden: int = 0,
) -> tuple[ActiveRows, Tensor | None]:
    """The rows of `linear_logps` and `logits_logps`; and, while a CUDA graph is recorded, which of them have no target.

    Raises:
        ValueError: naming the argument, what was expected and what came.
    """
    flat = target_ids.reshape(-1)
    ignored = flat == checks.IGNORED_TARGET
    index, left_out = None, None
    if is_capturing(flat):
        left_out = ignored
    else:
        index = _unless_all((~ignored).nonzero().squeeze(1), flat.shape[0])
    if isinstance(rule.temperature, Tensor):
        temperatures = _picked(rule.temperature, index, torch.float32)
        check_values(checks.temperatures(temperatures, ""), "auto")
        rule = rule._replace(temperature=temperatures)
    expected = f"ids in [0, {vocab_size}), or {checks.IGNORED_TARGET} for a row without a target"
    targets = checks.ids("target_ids", _picked(flat, index), vocab_size, "auto", expected=expected)
    if left_out is not None:
        targets = targets.clamp(0, vocab_size - 1)
    hidden_index = index
    if hidden_rows is not None:
        hidden_index = _hidden_index(hidden_rows, index, num_hidden, "auto")
    return ActiveRows(flat.shape[0], index, targets, rule, hidden_index, hidden_rows is not None), left_out


def _picked(x: Tensor, index: Tensor | None, dtype: torch.dtype = torch.int64) -> Tensor:
    x = x.detach().reshape(-1)
    return x.to(dtype, copy=True) if index is None else x.index_select(0, index).to(dtype)


def _hidden_index(hidden_rows: Tensor, index: Tensor | None, num_hidden: int, validate: str) -> Tensor:
    """(T,) the rows of hidden that the active tokens name, inside [0, num_hidden)."""
    expected = f"rows in [0, {num_hidden}) at the active tokens"
    return checks.ids("hidden_rows", _picked(hidden_rows, index), num_hidden, validate, expected=expected, kind="rows")


def _unless_all(index: Tensor, num_rows: int) -> Tensor | None:
    return None if index.shape[0] == num_rows else index


def _active_index(mask: Tensor | None, validate: str) -> Tensor | None:
    """(T,) rows that the mask keeps; None when it keeps all."""
    if mask is None:
        return None
    refuse("completion_mask", mask, mask)
    flat = mask.reshape(-1)
    kept = flat if flat.dtype == torch.bool else flat != 0
    checks.mask(flat, kept, validate)
    return _unless_all(kept.nonzero().squeeze(1), flat.shape[0])


def _segments(like: Tensor, cu_seqlens: Tensor | None, count: int, validate: str) -> tuple[Tensor, Tensor]:
    """(B,) rows of every completion and (N,) the completion of every row."""
    device, num_rows = like.device, like.numel()
    if cu_seqlens is None:
        length = num_rows // max(count, 1)
        lengths = torch.full((count,), length, dtype=torch.int64, device=device)
        return lengths, torch.arange(count, device=device).repeat_interleave(length)
    cu = cu_seqlens.long()
    lengths = cu.diff()
    checks.offsets(cu, lengths, num_rows, validate)
    return lengths, torch.arange(count, device=device).repeat_interleave(lengths, output_size=num_rows)


def _weights(
    lengths: Tensor,
    segments: Tensor,
    config: LossConfig,
    num_completions: int,
    num_items: Total | None,
    num_completions_in_batch: Total | None,
    validate: str,
) -> tuple[Tensor, Total | None]:
    """(T,) fp32 weights of the aggregation, and 1/num_items."""
    items = checks.total("num_items_in_batch", _on(lengths, num_items), validate)
    completions = checks.total("num_completions_in_batch", _on(lengths, num_completions_in_batch), validate)
    name = str(config.aggregation)
    total = denominator(
        name, num_completions, max_completion_length=config.max_completion_length, num_items_in_batch=items,
        num_completions_in_batch=completions,
    )  # fmt: skip
    total = max(segments.shape[0], 1) if total is None else total
    weights = completion_weights(lengths, total, AGGREGATIONS[name].by_length)[segments]
    return weights, None if items is None else 1.0 / items


def _on(like: Tensor, value: Total | None) -> Total | None:
    return value.detach().reshape(()).to(like.device) if isinstance(value, Tensor) else value


def _check(tokens: Tokens, temperatures: Tensor | None, validate: str) -> None:
    """What only the values of the active tokens can tell."""
    found = checks.finite("advantages", tokens.advantages, "finite numbers", "NaN or inf")
    for name in ("old_logps", "ref_logps"):
        values = getattr(tokens, name)
        if values is not None:
            found += checks.finite(name, values, "numbers at the active tokens", "NaN")
    if temperatures is not None:
        found += checks.temperatures(temperatures, " at the active tokens")
    check_values(found, validate)
