"""`Call`: one call of a public loss or logps function.

A public function builds a `Call` once from its arguments. The call checks them (checks.py), and
converts a padded or packed batch of N token rows to its T active rows. Masked rows are removed
before any computation, so that their values cannot affect a result. The caller's per-token tensors
are copied, because metrics are computed later, when the caller may have changed the tensors.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from grpo_fast.kernels.divergence import DivergenceTerm, TeacherHead
from grpo_fast.kernels.gpu.launch import is_capturing, refuse
from grpo_fast.kernels.head.driver import Driver, linear_driver, logits_driver
from grpo_fast.kernels.head.shards import VocabularyShard
from grpo_fast.kernels.head.terms import saves_time
from grpo_fast.kernels.route import Route, head_route, kernel_module, rows_route, uses_triton
from grpo_fast.kernels.types import (
    ActiveRows,
    HeadTensors,
    LogitTransform,
    Support,
    SupportRows,
    Values,
    Wanted,
    detached,
    elements_at,
    rows_of,
)
from grpo_fast.loss import checks
from grpo_fast.loss.checks import ValueChecks
from grpo_fast.objective.aggregation import Tokens, Total, step_weights
from grpo_fast.objective.config import LossConfig

RowTensors = tuple[Any, ...]
# Maximum size of hidden states that a call of `linear_logps` may copy to avoid a GPU sync. A longer
# call takes so long on a GPU that the sync does not matter.
MOVED_BYTES = 128 << 20


@dataclasses.dataclass(eq=False, kw_only=True)
class Call:
    """One call of a public function, with the arguments under their public names.

    Attributes:
        tensors: the differentiable tensors, flattened to N rows. They are (hidden, weight, bias),
            (logits,) or (logps, entropy). A shard has its own rows of weight and bias. They are
            dropped when the computation begins.
        like: (B, L) or (T,): target_ids, or the logps of `grpo_loss`.
        shard: this rank's part of the vocabulary.
        wanted: for each of the tensors, whether autograd needs its gradient. The flags of missing
            tensors are False.
        rows: the active rows, set by `find_tokens` or `find_targets`.
        tokens: the inputs of the loss for the active tokens, set by `find_tokens`. None for logps
            and `linear_divergence`.
        weights: (T,) weights of the rows of `linear_divergence`, set by `find_all_rows`.
        left_out: (T,) bool mask of kept rows whose results must be set to 0, or None.
        outputs: results of a loss without a gradient, set by `LossFunction`: logps, entropies,
            metrics of grad_filter, and divergences.
    """

    tensors: RowTensors
    like: Tensor
    shard: VocabularyShard | None = None
    backend: str = "auto"
    validate: str = "auto"
    hidden_rows: Tensor | None = None
    support: Support | None = None
    # Arguments of the losses.
    config: LossConfig | None = None
    advantages: Tensor | None = None
    completion_mask: Tensor | None = None
    cu_seqlens: Tensor | None = None
    old_logps: Tensor | None = None
    ref_logps: Tensor | None = None
    sampling_logps: Tensor | None = None
    num_items_in_batch: Total | None = None
    num_completions_in_batch: Total | None = None
    grad_filter: float | None = None
    divergence: DivergenceTerm | None = None
    inplace: bool = False
    # Arguments of the logps.
    temperature: float = 1.0
    softcap: float | None = None
    logit_scale: float = 1.0
    return_entropy: bool = False

    def __post_init__(self) -> None:
        on = torch.is_grad_enabled()
        wanted = [on and x is not None and x.requires_grad for x in self.tensors]
        self.wanted = Wanted(*wanted, *[False] * (3 - len(wanted)))
        self.checks = ValueChecks(self.validate, self.backend)
        self.rows: ActiveRows
        self.tokens: Tokens | None = None
        self.weights: Tensor
        self.left_out: Tensor | None = None
        self.outputs: tuple[Any, ...] = ()
        self._route: Route | None = None

    @property
    def has_logits(self) -> bool:
        """Return whether logps are computed from logits, and not given."""
        return len(self.tensors) != 2

    @property
    def transform(self) -> LogitTransform:
        """Return the transform from raw logits to the logits of the softmax."""
        x = self if self.config is None else self.config
        return LogitTransform.of(x.logit_scale, x.softcap, x.temperature)

    @property
    def vocabulary_size(self) -> int:
        """Return V, the number of logits of a row."""
        if self.shard is not None:
            return self.shard.vocabulary
        is_head = len(self.tensors) == 3
        return int(self.tensors[1].shape[0] if is_head else self.tensors[0].shape[1])

    # ---- Active rows

    def find_tokens(self) -> Call:
        """Find the active tokens of a loss, and check the values of the arguments."""
        config = self.config
        assert config is not None
        # 1. Find the completion of each active token, and its values.
        like = self.like
        cu = self.cu_seqlens
        count = like.shape[0] if cu is None else cu.shape[0] - 1
        index = self._unmasked()
        segments, values = self._expanded(index, count)
        # 2. Compute the inputs of the loss, and check their values.
        self._find_inputs(config, segments, values, count)
        ids = segments
        if self.has_logits:
            end = self.vocabulary_size
            expected = f"ids in [0, {end}) at the active tokens"
            ids = selected_ids(like, index)
            ids = checks.checked_ids("target_ids", ids, end, self.checks, expected=expected)
        self.rows = self._rows(index, ids)
        return self

    def find_targets(self) -> Call:
        """Find the rows of `linear_logps` or `logits_logps` that have a target.

        Usually, rows with target -100 are removed. On a GPU this costs a sync, because the host
        needs the number of remaining rows. All rows are kept in four cases. In the first three,
        `left_out` marks the rows with target -100, whose results must be set to 0. In the fourth,
        the kernels write 0 for these rows.

        - A CUDA graph is captured. The number of rows must then not depend on the values of
          targets.
        - The logits are given on a GPU. The row kernels process all rows in any case.
        - The gradient is small, so that a GPU would take longer to wait than to compute all rows.
          Rows with target -100 must not change the products, even if they are NaN, so this is done
          only if exponentials are stored.
        - The Triton kernels compute logps without a gradient. They skip each block of rows that
          contains no target. In a large call, the rows with target -100 are moved to the end first.
        """
        flat = self.like.reshape(-1)
        is_ignored = flat == checks.IGNORED_TARGET
        takes_all = flat.is_cuda and len(self.tensors) == 1 and self.support is None
        takes_all = takes_all or is_capturing(flat) or self._keeps_all_rows()
        skips = not (takes_all or any(self.wanted)) and self._skips_blocks()
        index: Tensor | None = None
        ignored: Tensor | None = is_ignored
        if not (takes_all or skips):
            index = unless_all(~is_ignored)
            ignored = None
        elif skips and saves_time(flat, 2 * flat.numel() * self.tensors[1].numel()):
            # Sort bytes, because torch does not sort bool tensors on every device.
            order = is_ignored.view(torch.uint8).sort(stable=True)
            index = order.indices
            ignored = order.values.view(torch.bool)

        end = self.vocabulary_size
        expected = f"ids in [0, {end}), or {checks.IGNORED_TARGET} for a row without a target"
        ids = selected_ids(flat, index)
        valid = ids if ignored is None else ids.masked_fill(ignored, 0)
        if skips:
            # For an id outside of [0, V), such as -100, the kernels return 0.
            checks.check_ids("target_ids", valid, end, self.checks, expected=expected)
        else:
            ids = checks.checked_ids("target_ids", valid, end, self.checks, expected=expected)
            self.left_out = ignored
        self.rows = self._rows(index, ids)
        return self

    def find_all_rows(self, weights: Tensor) -> Call:
        """Take all rows of `linear_divergence`, with their weights (N,).

        The kernels expect a target in every row, but a divergence has no targets. Each row gets
        the dummy target 0.
        """
        self.weights = weights
        like = self.like
        ids = torch.zeros(like.numel(), dtype=torch.int64, device=like.device)
        self.rows = self._rows(None, ids)
        self.checks.send()
        return self

    def _keeps_all_rows(self) -> bool:
        """Return whether a pass with gradient is too small to wait for the number of targets."""
        if not (self._is_plain_head and any(self.wanted)) or self.return_entropy:
            return False
        hidden, weight, _ = self.tensors
        if saves_time(hidden, 4 * self.like.numel() * weight.numel()):
            return False
        return head_route(self.backend, weight).exponentials is not None

    def _skips_blocks(self) -> bool:
        """Return whether a pass without gradient skips each block of rows without a target."""
        if not self._is_plain_head or self.tensors[0].nbytes > MOVED_BYTES:
            return False
        return self.route(self.tensors).backend == "triton"

    @property
    def _is_plain_head(self) -> bool:
        """Return whether a head on a GPU may compute rows without a target.

        With `hidden_rows` it may not, because their values may be invalid in such rows.
        """
        others = (self.support, self.hidden_rows, self.shard)
        return self.like.is_cuda and len(self.tensors) == 3 and all(x is None for x in others)

    def _rows(self, index: Tensor | None, target_ids: Tensor) -> ActiveRows:
        """Return the active rows in the form that the kernels expect. Both arguments are (T,)."""
        support = None
        if self.support is not None:
            end = self.vocabulary_size
            support = support_rows(self.support, index, target_ids, end, self.checks)
        predicting = index
        if self.hidden_rows is not None:
            end = len(self.tensors[0])
            predicting = checks.checked_ids(
                "hidden_rows", selected_ids(self.hidden_rows, index), end, self.checks,
                kind="rows", expected=f"rows in [0, {end}) at the active tokens",
            )  # fmt: skip
        repeats = self.hidden_rows is not None
        count = self.like.numel()
        return ActiveRows(count, index, target_ids, self.transform, predicting, repeats, support)

    def _unmasked(self) -> Tensor | None:
        """Return the indices of the tokens that the mask keeps, or None if it keeps all."""
        mask = self.completion_mask
        if mask is None:
            return None
        refuse("completion_mask", mask, mask)
        flat = mask.reshape(-1)
        if flat.dtype != torch.bool:
            checks.check_numbers(self.checks, completion_mask=flat)
            flat = flat != 0
        return unless_all(flat)

    def _expanded(self, index: Tensor | None, count: int) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the completion of each active token, and copies of the inputs by name.

        Returns:
            A pair (segments, values). The segments, (T,) int64, ascend. The values are (T,) fp32.
        """
        advantages = self.advantages
        assert advantages is not None
        num_rows = self.like.numel()
        cu = self.cu_seqlens
        if cu is not None:
            checks.check_offsets(cu, num_rows, self.checks)
        per_token = advantages.shape != (count,)
        given = {"advantages": detached(advantages).reshape(-1)}
        for name in ("old_logps", "ref_logps", "sampling_logps"):
            x = getattr(self, name)
            if x is not None:
                given[name] = detached(x).reshape(-1)
        # Use torch under a transform of torch.func. Its tensors have no memory, so a Triton kernel
        # would fail before the autograd function can report that torch.func is not supported.
        if uses_triton(self.like, self.backend) and not torch._C._are_functorch_transforms_active():
            from grpo_fast.kernels.gpu.tokens import expanded

            first, *others = given.values()
            segments, matrix = expanded(
                index, cu, num_rows, count, first, others, per_token=per_token
            )
        else:
            segments = elements_at(self._segments(count), index)
            at = dict.fromkeys(given, index)
            if not per_token:
                at["advantages"] = segments
            # Copy all values in one operation.
            matrix = torch.stack([elements_at(x, at[name]).float() for name, x in given.items()])
        return segments, dict(zip(given, matrix.unbind(), strict=True))

    def _segments(self, count: int) -> Tensor:
        """Return the index of each row's completion, (N,) int64. The indices ascend."""
        device = self.like.device
        num_rows = self.like.numel()
        cu = self.cu_seqlens
        if cu is None:
            return torch.arange(count, device=device).repeat_interleave(num_rows // max(count, 1))
        rows = torch.arange(num_rows, dtype=cu.dtype, device=device)
        # With right=True, an empty completion gets no row. Pass only the inner offsets, because the
        # indices are then less than B. A binary search gives ascending indices for ascending rows.
        # Both properties hold even if the offsets on a GPU are invalid.
        return torch.searchsorted(cu[1:-1], rows, right=True)

    def _find_inputs(
        self, config: LossConfig, segments: Tensor, values: dict[str, Tensor], count: int
    ) -> None:
        """Set `tokens`, the inputs of the loss for the active tokens."""
        # 1. Check num_items_in_batch and num_completions_in_batch, which divide the token weights.
        items = self.num_items_in_batch
        device = segments.device
        items = checks.checked_total("num_items_in_batch", items, device, self.checks)
        completions = checks.checked_total(
            "num_completions_in_batch", self.num_completions_in_batch, device, self.checks
        )
        # 2. Compute the weight of every token.
        lengths = lengths_of(segments, count)
        weights = step_weights(
            str(config.aggregation), segments, lengths, count, len(segments),
            max_completion_length=config.max_completion_length, num_items_in_batch=items,
            num_completions_in_batch=completions,
        )  # fmt: skip
        entropy_weight = None if items is None else 1.0 / items
        rules = checks.LOGPS_RULES if self.has_logits else checks.RULES
        checks.check_numbers(self.checks, rules, **values)
        self.tokens = Tokens(
            values["advantages"], weights, entropy_weight, lengths, segments,
            values.get("old_logps"), values.get("ref_logps"), values.get("sampling_logps"),
        )  # fmt: skip

    # ---- Kernels

    def route(self, tensors: RowTensors) -> Route:
        """Return the kernels for the tensors of the call.

        Divergences need rows of logits, as a vocabulary shard does. They cannot use the kernels
        that compute logps directly from hidden states.
        """
        if self._route is None:
            if len(tensors) == 1:
                self._route = rows_route(self.backend, tensors[0])
            else:
                needs_rows = self.shard is not None or self.divergence is not None
                self._route = head_route(self.backend, tensors[1], is_shard=needs_rows)
        return self._route

    def driver(
        self, tensors: RowTensors, route: Route, *, entropy_gradient: bool, keep_fp32: bool = False
    ) -> Driver:
        """Create the driver of a pass over the active rows.

        Args:
            tensors: `self.tensors` without autograd history.
            route: the result of `route`.
            entropy_gradient: whether the coefficients will include dL/dentropy.
            keep_fp32: return gradients in the dtype of their sums, at least fp32.
        """
        if len(tensors) == 1:
            out = tensors[0] if self.inplace else None
            return logits_driver(tensors[0], out, self.rows, route)
        term = self.divergence
        # A second buffer holds the logits of a teacher's LM head. With a top-k teacher and a policy
        # loss, it holds the gradient of the divergence.
        has_policy = self.config is not None
        is_pair = term is not None and (has_policy or isinstance(term.teacher, TeacherHead))
        return linear_driver(
            HeadTensors(*tensors), self.rows, route, shard=self.shard,
            entropy_gradient=entropy_gradient, keep_fp32=keep_fp32, needs_d_weight=self.wanted[1],
            tolerance=self.grad_filter, buffers=2 if is_pair else 1,
        )  # fmt: skip

    def shaped(self, x: Values) -> Values:
        """Return one value per row in the layout of the targets. None stays None."""
        return x if x is None or self.like.dim() == 1 else x.reshape(self.like.shape)


def selected_ids(x: Tensor, index: Tensor | None) -> Tensor:
    """Return the active ids of x, which has N elements, as a flat int64 tensor.

    The result may share memory with x. The caller must copy it, because metrics are computed
    later, when the caller of the public function may have changed x.
    """
    # Skip the steps that change nothing, because each of them takes the host a microsecond.
    x = detached(x)
    if x.dim() != 1:
        x = x.reshape(-1)
    x = elements_at(x, index)
    return x if x.dtype == torch.int64 else x.long()


def lengths_of(segments: Tensor, count: int) -> Callable[[], Tensor]:
    """Return a function that returns the number of tokens of each of `count` completions.

    `segments` must be ascending. The lengths are computed once, when they are first needed.
    """

    @functools.cache
    def lengths() -> Tensor:
        # Find the first token of each completion by a binary search. bincount would cost two GPU
        # syncs.
        starts = torch.arange(count + 1, device=segments.device)
        return torch.searchsorted(segments, starts).diff()

    return lengths


def unless_all(is_active: Tensor) -> Tensor | None:
    """Return the indices of the active rows, or None if all rows are active."""
    index = is_active.nonzero().squeeze(1)
    return None if len(index) == len(is_active) else index


def support_rows(
    support: Support, index: Tensor | None, target_ids: Tensor, vocab_size: int, found: ValueChecks
) -> SupportRows | None:
    """Convert a `Support` to the form that the kernels expect.

    Rows with an empty set use the full vocabulary. If all active rows have an empty set, the result
    is None. The host must know the total size of all sets, which costs a GPU sync.

    Args:
        support: one set of ids for each target of the caller.
        index: (T,), int64. Positions of the active targets. None if all targets are active.
        target_ids: (T,), int64. The active targets.
        vocab_size: V.
        found: the checks of the call.
    """
    # 1. Find the start and the size of the set of each active row.
    count = len(support.ids)
    bounds = support.offsets
    checks.check_offsets(bounds, count, found, "support.offsets", "nnz")
    if found.are_late(bounds):
        # Force the offsets to be ascending and in range, so that no set has a negative length.
        bounds = bounds.clamp(0, count).cummax(0).values
    starts = elements_at(bounds[:-1], index)
    lengths = elements_at(bounds.diff(), index)
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
    columns = checks.checked_ids("support.ids", columns, vocab_size, found, expected=expected)
    # 4. Find the position of each target in its set.
    target_places = kernel_module("support", "cpu" if columns.is_cpu else "torch").target_places
    places, repeated = target_places(columns, bounds, target_ids, vocab_size)
    _check_targets(target_ids, places, repeated, found)
    if found.are_late(places):
        places = places.clamp(min=0)
    return SupportRows(own_rows, other_rows, columns, bounds, places)


def _sizes(has_set: Tensor, lengths: Tensor) -> tuple[int, int]:
    """Return the number of rows with a set, and the total size of all sets.

    benchmarks/gpu/trace.py replaces this function, because fake tensors have no values.
    """
    # Copy both numbers to the host in one transfer, because each transfer costs a GPU sync.
    count, total = torch.stack([has_set.sum(), lengths.sum()]).tolist()
    return count, total


def _check_targets(ids: Tensor, places: Tensor, repeated: Tensor, found: ValueChecks) -> None:
    missing = places < 0
    absent = "support: expected every active target among the ids of its set"
    if places.is_cpu and missing.any():
        first = int(ids[missing][0])
        absent += f", got {int(missing.sum())} that are not, the first of them target id {first}"
    found.add_flag(missing.any(), absent)
    twice = "support.ids: expected no id twice in one row, got id"
    found.add(lambda x, *_: "" if x < 0 else f"{twice} {x:.0f} twice", repeated.reshape(1))
