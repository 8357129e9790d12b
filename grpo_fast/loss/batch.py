"""`TokenBatch`: the active tokens of a call in flat form.

A padded or packed call with N token rows is converted to its T active rows, each with the index of
its completion. Masked rows are removed before any computation, so that their values cannot affect a
result. A batch copies the caller's per-token tensors, because metrics are computed later, when the
caller may have changed the tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from grpo_fast.kernels.gpu.capture import is_capturing, refuse
from grpo_fast.kernels.head.sums import weight_unit
from grpo_fast.kernels.head.terms import saves_time
from grpo_fast.kernels.route import head_route
from grpo_fast.kernels.types import ActiveRows, LogitTransform
from grpo_fast.loss import values
from grpo_fast.loss.arguments import BatchInputs, Options, RowOptions, RowTensors
from grpo_fast.loss.support_rows import support_rows
from grpo_fast.loss.value_checks import ValueChecks
from grpo_fast.objective.aggregation import step_weights
from grpo_fast.objective.config import LossConfig
from grpo_fast.objective.metrics import token_metrics
from grpo_fast.objective.tokens import Tokens

# Maximum size of hidden states that a call of `linear_logps` may copy to avoid a GPU sync. A longer
# call takes so long on a GPU that the sync does not matter.
MOVED_BYTES = 128 << 20


class TokenBatch(NamedTuple):
    """The T active tokens of a call: their rows of logits, their loss inputs, and the config."""

    rows: ActiveRows
    tokens: Tokens
    config: LossConfig
    checks: ValueChecks  # the value checks of the call

    @classmethod
    def build(
        cls, tensors: RowTensors, options: Options, config: LossConfig, inputs: BatchInputs
    ) -> TokenBatch:
        """Check the values of the arguments, and build the batch.

        The caller must have checked the shapes of the arguments.

        Args:
            tensors: (hidden, weight, bias), (logits,) or (logps, entropy), flattened to N rows.
            options: the options of the call that are not part of the config.
            config: the options of the loss.
            inputs: tensors per token and per completion, in the caller's layout.
        """
        checks = ValueChecks(options.validate)
        has_logits = len(tensors) != 2
        places = _active_tokens(inputs, checks)
        tokens = _tokens(places, config, inputs)
        temperature = config.temperature if has_logits else 1.0
        if isinstance(temperature, Tensor):
            temperature = places.select(temperature, torch.float32)
        values.check_numbers(
            checks, values.LOGPS_RULES if has_logits else values.RULES,
            advantages=tokens.advantages, old_logps=tokens.old_logps, ref_logps=tokens.ref_logps,
            sampling_logps=tokens.sampling_logps, temperature=temperature,
        )  # fmt: skip
        transform = LogitTransform(config.logit_scale, config.softcap, temperature)
        ids = places.segments
        if has_logits:
            end = vocabulary_size(tensors, options)
            expected = f"ids in [0, {end}) at the active tokens"
            ids = places.select(inputs.like)
            ids = values.checked_ids("target_ids", ids, end, checks, expected=expected)
        return cls(places.rows(ids, transform, tensors, options), tokens, config, checks)

    def with_scaled_weights(self) -> TokenBatch:
        """Return the batch with token weights scaled up, so that fp16 gradients do not underflow.

        The scale is a power of two that moves the largest weight into the range 0.5 to 1. It is
        stored in `tokens.unit`, so that the loss and the gradients can be divided by it later.
        """
        unit = weight_unit(self.tokens.token_weights)
        weights = self.tokens.token_weights * unit
        return self._replace(tokens=self.tokens._replace(token_weights=weights, unit=unit))

    def metrics(self, logps: Tensor, entropy: Tensor | None) -> dict[str, Tensor]:
        """Compute the metrics of a call under the names that TRL uses.

        Args:
            logps: (N,), the logps that the call returned.
            entropy: (N,), the entropies that the call returned, or None.

        Returns:
            0-d tensors, keyed by name.
        """
        active = self.rows.active
        return token_metrics(
            active(logps), active(entropy), self.tokens, self.config, self.rows.num_rows
        )


def active_target_rows(
    tensors: RowTensors, options: RowOptions, wanted: Sequence[bool]
) -> tuple[ActiveRows, Tensor | None, ValueChecks]:
    """Return the active rows of `linear_logps` or `logits_logps`, and a mask of ignored rows.

    The third element of the result holds the value checks of the call.

    Usually, rows with target -100 are removed and the mask is None. On a GPU this costs a sync,
    because the host needs the number of remaining rows. If all rows are kept instead, the mask
    marks the rows with target -100, and the caller must set their results to 0. All rows are kept
    in three cases:

    - A CUDA graph is captured. The number of rows must then not depend on the values of targets.
    - The logits are given on a GPU. The row kernels process all rows in any case.
    - The Triton kernels compute logps without a gradient. They skip each block of rows that
      contains no target. In a large call, the rows with target -100 are moved to the end first.

    Args:
        tensors: (hidden, weight, bias) or (logits,), flattened to N rows.
        options: the options of the call.
        wanted: for each tensor, whether it needs a gradient.
    """
    transform = options.transform
    checks = ValueChecks("auto")
    flat = options.target_ids.reshape(-1)
    is_ignored = flat == values.IGNORED_TARGET
    takes_all = flat.is_cuda and len(tensors) == 1 and options.support is None
    takes_all = takes_all or is_capturing(flat)
    skips = not (takes_all or any(wanted)) and _skips_blocks(tensors, options)
    index: Tensor | None = None
    ignored: Tensor | None = is_ignored
    if not (takes_all or skips):
        index, ignored = _unless_all(~is_ignored), None
    elif skips and saves_time(flat, 2 * len(flat) * tensors[1].numel()):
        # Sort bytes, because torch does not sort bool tensors on every device.
        order = is_ignored.view(torch.uint8).sort(stable=True)
        index, ignored = order.indices, order.values.view(torch.bool)
    places = ActiveTokens(len(flat), index, flat, flat, checks)

    def valid(x: Tensor, fill: float) -> Tensor:
        return x if ignored is None else torch.where(ignored, fill, x)

    if isinstance(transform.temperature, Tensor):
        temperatures = valid(places.select(transform.temperature, torch.float32), 1)
        values.check_numbers(checks, temperature=temperatures)
        transform = transform._replace(temperature=temperatures)
    end = vocabulary_size(tensors, options)
    expected = f"ids in [0, {end}), or {values.IGNORED_TARGET} for a row without a target"
    ids = valid(places.select(flat), 0)
    ids = values.checked_ids("target_ids", ids, end, checks, expected=expected)
    ids = valid(ids, -1) if skips else ids
    return places.rows(ids, transform, tensors, options), ignored, checks


def _skips_blocks(tensors: RowTensors, options: RowOptions) -> bool:
    """Return whether a pass without gradient skips each block of rows that contains no target."""
    hidden = tensors[0]
    if not hidden.is_cuda or len(tensors) == 1 or hidden.nbytes > MOVED_BYTES:
        return False
    # `hidden_rows` may be invalid in rows without a target.
    if options.support is not None or options.hidden_rows is not None or options.shard is not None:
        return False
    return head_route(options.backend, tensors[1]).backend == "triton"


class ActiveTokens(NamedTuple):
    """The active rows of a call with N rows, each with the index of its completion."""

    num_rows: int  # N
    active_index: Tensor | None  # (T,) int64; None: all N rows
    lengths: Tensor  # (B,) int64, active tokens of each completion
    segments: Tensor  # (T,) int64
    checks: ValueChecks  # collects the value checks of the call

    def select(self, x: Tensor, dtype: torch.dtype = torch.int64) -> Tensor:
        """Return the active elements of x, which has N elements, as a flat tensor.

        A float result is a copy of x. An int64 result may share memory with x, so the caller must
        pass it to `checked_ids`, which returns a copy.
        """
        x = x.detach().reshape(-1)
        if self.active_index is None:
            # Copy float tensors even if they have the requested dtype. The metrics are computed
            # later, when the caller may have changed x.
            return x.to(dtype, copy=dtype != torch.int64)
        return x.index_select(0, self.active_index).to(dtype)

    def select_optional(self, x: Tensor | None) -> Tensor | None:
        return None if x is None else self.select(x, torch.float32)

    def rows(
        self,
        target_ids: Tensor,  # (T,)
        transform: LogitTransform,
        tensors: RowTensors,
        options: Options | RowOptions,
    ) -> ActiveRows:
        """Return the active rows in the form that the kernels expect."""
        rows = ActiveRows(
            self.num_rows, self.active_index, target_ids, transform, self.active_index
        )
        if options.support is not None:
            vocab_size = vocabulary_size(tensors, options)
            support = support_rows(
                options.support, self.active_index, target_ids, vocab_size, self.checks
            )
            rows = rows._replace(support=support)
        if options.hidden_rows is not None:
            end = len(tensors[0])
            predicting = values.checked_ids(
                "hidden_rows", self.select(options.hidden_rows), end, self.checks, kind="rows",
                expected=f"rows in [0, {end}) at the active tokens",
            )  # fmt: skip
            rows = rows._replace(hidden_index=predicting, repeats=True)
        return rows


def vocabulary_size(tensors: RowTensors, options: Options | RowOptions) -> int:
    """Return V, the vocabulary size of a call with (hidden, weight, bias) or (logits,)."""
    if options.shard is not None:
        return options.shard.vocabulary
    return len(tensors[1]) if len(tensors) == 3 else int(tensors[0].shape[1])


def _active_tokens(inputs: BatchInputs, checks: ValueChecks) -> ActiveTokens:
    like = inputs.like
    count = like.shape[0] if inputs.cu_seqlens is None else inputs.cu_seqlens.shape[0] - 1
    index = _active_index(inputs.completion_mask, checks)
    lengths, segments = _segments(like, inputs.cu_seqlens, count, checks)
    if index is not None:
        segments = segments.index_select(0, index)
        # The length of a completion is the number of its active tokens. Find the first token of
        # each completion by a binary search, because the segments are in ascending order. bincount
        # would cost two GPU syncs.
        numbers = torch.arange(count + 1, device=like.device)
        lengths = torch.searchsorted(segments, numbers).diff()
    return ActiveTokens(like.numel(), index, lengths, segments, checks)


def _unless_all(is_active: Tensor) -> Tensor | None:
    """Return the indices of the active rows, or None if all rows are active."""
    index = is_active.nonzero().squeeze(1)
    return None if len(index) == len(is_active) else index


def _active_index(mask: Tensor | None, checks: ValueChecks) -> Tensor | None:
    if mask is None:
        return None
    refuse("completion_mask", mask, mask)
    flat = mask.reshape(-1)
    if flat.dtype != torch.bool:
        values.check_numbers(checks, completion_mask=flat)
        flat = flat != 0
    return _unless_all(flat)


def _segments(
    like: Tensor, cu_seqlens: Tensor | None, count: int, checks: ValueChecks
) -> tuple[Tensor, Tensor]:
    """Return the number of rows of each completion (B,), and the completion of each row (N,)."""
    device = like.device
    num_rows = like.numel()
    if cu_seqlens is None:
        length = num_rows // max(count, 1)
        lengths = torch.full((count,), length, dtype=torch.int64, device=device)
        return lengths, torch.arange(count, device=device).repeat_interleave(length)
    cu = values.checked_offsets(cu_seqlens.long(), num_rows, checks)
    rows = torch.arange(num_rows, device=device)
    # With right=True, an empty completion gets no row. With only the inner offsets, the index of a
    # completion is less than B even if the offsets on a GPU are invalid.
    return cu.diff(), torch.searchsorted(cu[1:-1], rows, right=True)


def _tokens(places: ActiveTokens, config: LossConfig, inputs: BatchInputs) -> Tokens:
    # 1. Check num_items_in_batch and num_completions_in_batch, which divide the token weights.
    advantages = inputs.advantages
    items = inputs.num_items_in_batch
    by_prompt = config.aggregation == "prompt_mean"
    device = places.lengths.device
    if not by_prompt:
        items = values.checked_total("num_items_in_batch", items, device, places.checks)
    elif isinstance(items, Tensor):
        items = items.detach().to(device, non_blocking=device.type == "cuda").double()
        values.check_numbers(places.checks, num_items_in_batch=items)
    completions = values.checked_total(
        "num_completions_in_batch", inputs.num_completions_in_batch, device, places.checks
    )
    # 2. Compute the weight of every token.
    weights = step_weights(
        str(config.aggregation), places.lengths, places.segments.shape[0],
        max_completion_length=config.max_completion_length, num_items_in_batch=items,
        num_completions_in_batch=completions, group_size=config.group_size,
    )[places.segments]  # fmt: skip
    # If the loss is averaged over prompts, average the entropy bonus with the same weights.
    # Otherwise, average it over tokens.
    entropy_weight: float | Tensor | None = None
    if by_prompt:
        entropy_weight = weights
    elif items is not None:
        entropy_weight = 1.0 / items
    # 3. Expand advantages to one per token.
    if advantages.dim() == 1 and advantages.shape[0] == places.lengths.shape[0]:
        per_token = advantages.detach().float()[places.segments]
    else:
        per_token = places.select(advantages, torch.float32)
    return Tokens(
        per_token, weights, entropy_weight, places.lengths, places.segments,
        places.select_optional(inputs.old_logps), places.select_optional(inputs.ref_logps),
        places.select_optional(inputs.sampling_logps),
    )  # fmt: skip
