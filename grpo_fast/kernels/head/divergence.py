"""LM head with divergences from a teacher, with or without a policy loss.

The head processes chunks of rows as loop.py does, with the teacher's logits in a second buffer:

    student's logits z, teacher's y
    → the divergence kernel overwrites y with its d-logits
    → the loss's row kernel overwrites z with its d-logits
    → sum d of both, dH = d·W, dW += dᵀ·hidden

The cost is 8·N·V·H flops if the teacher has an LM head of the same hidden size, and 6·N·V·H for a
top-k teacher. A policy loss does not increase it. The workspace takes 8 bytes per logit, or 4 bytes
for a top-k teacher without a policy loss.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from grpo_fast.kernels.divergence_reference import row_topk_divergence_
from grpo_fast.kernels.head.activity import Activity, active_rows
from grpo_fast.kernels.head.chunks import LogitChunks
from grpo_fast.kernels.head.gathered import SupportGradient
from grpo_fast.kernels.head.gradients import ChunkGradients
from grpo_fast.kernels.head.loop import LinearHead, concat_chunks
from grpo_fast.kernels.head.products import matmul_logits
from grpo_fast.kernels.head.support import supported_head
from grpo_fast.kernels.head.vocabulary import VocabularyChunks
from grpo_fast.kernels.route import Route, kernel_module
from grpo_fast.kernels.teachers import Divergence, DivergenceRows, Teacher, TeacherHead
from grpo_fast.kernels.types import (
    ActiveRows,
    ChunkRows,
    HeadTensors,
    RowLoss,
    RowStats,
    Wanted,
    pad_rows,
    pick,
)
from grpo_fast.objective.coefficients import RowTerms
from grpo_fast.objective.config import LossConfig

# Type of a function that computes the policy loss of a chunk. It returns the d-logits, (padded C,
# V), dL/dlogp, (C,), and either dL/dentropy, (C,), or None.
Policy = Callable[[slice, ChunkRows], tuple[Tensor, Tensor, Tensor | None]]


@dataclass(eq=False, kw_only=True)
class DivergenceHead(LinearHead):
    """A `LinearHead` that also computes the divergences D of all rows.

    Its gradients include the gradient of Σ weights·D. It also takes the arguments of `LinearHead`.

    Args:
        teacher: the teacher of all N rows.
        divergence: the kind of divergence and its parameter.
        weights: (T,) fp32. A row with weight 0 has a value but no gradient.
        has_policy: whether a policy loss is computed in the same pass.
    """

    teacher: Teacher
    divergence: Divergence
    weights: Tensor  # (T,)
    has_policy: bool

    def __post_init__(self) -> None:
        # With a teacher that has an LM head, the second buffer holds its logits. With a top-k
        # teacher and a policy loss, it holds the gradient of the divergence.
        self.buffers = 2 if isinstance(self.teacher, TeacherHead) or self.has_policy else 1
        self.row_kernels = kernel_module("divergence", self.route.backend)
        self.has_gradient = False
        self.values = torch.zeros_like(self.weights)  # (T,) divergences
        super().__post_init__()

    def _new_chunk(self) -> LogitChunks:
        """Create the logit chunk, with a second buffer if needed."""
        head = self.weight, self.bias, self.route
        chunk = LogitChunks(*head) if self.shard is None else VocabularyChunks(*head, self.shard)
        chunk.buffers = self.buffers
        chunk.bytes_per_logit += (self.buffers - 1) * chunk.dtype.itemsize
        return chunk

    def loss_gradients(
        self, terms: RowTerms, config: LossConfig, wanted: Wanted
    ) -> tuple[RowLoss, tuple[Tensor, Tensor, Tensor]]:
        """Compute the policy loss, the divergences and all gradients in one pass."""
        parts = []

        def policy(chunk: slice, at: ChunkRows) -> tuple[Tensor, Tensor, Tensor | None]:
            here = terms.rows(chunk)
            d, part = self.chunk.row_loss(at, here, config, cached=True)
            parts.append(part)
            return d.matrix, part.grad_logps, here.grad_entropy

        gradients = self.sweep(wanted, policy)
        return RowLoss(*concat_chunks(parts, self.hidden)), gradients

    def gradients(
        self, g: Tensor, g_entropy: Tensor | None, known: RowStats, wanted: Wanted
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the gradients of Σ (g·logp + g_entropy·entropy) + Σ weights·D.

        Every chunk is processed again, because its divergences must be computed.
        """
        if not any(wanted):
            return self.sweep(wanted)

        def policy(chunk: slice, at: ChunkRows) -> tuple[Tensor, Tensor, Tensor | None]:
            here = pick(chunk, g, g_entropy)
            d = self.chunk.gradients(at, pick(chunk, *known), *here, cached=True)
            return d.matrix, *here

        return self.sweep(wanted, policy)

    def sweep(self, wanted: Wanted, policy: Policy | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the divergences and the gradients (dH, dW, db) of Σ weights·D.

        If `policy` is given, the gradients of the policy loss are added.
        """
        sums = self._sums(wanted)
        self.has_gradient = any(wanted)
        active = self.weights != 0
        activity = Activity(active if self.on_gpu and policy is None else None, self.chunk_rows)
        for chunk in self.chunks():
            at = self._rows_of(chunk)
            count = chunk.stop - chunk.start
            # 1. Compute the chunk's logits and divergences. The policy loss then uses the same
            # logits, which its kernel overwrites with d-logits.
            self._compute_divergences(chunk, self.chunk.raw_logits(at.hidden))
            if policy is None:
                keep = activity.keep(chunk) if self.on_gpu else active[chunk].nonzero()[:, 0]
            else:
                d_policy, g, g_entropy = policy(chunk, at)
                # On a GPU, keep all rows, because the host would have to wait for the coefficients.
                # Rows with coefficient 0 stay in the GEMMs as zeros.
                is_active = None if self.on_gpu else active[chunk] | active_rows(g, g_entropy)
                keep = None if is_active is None else is_active.nonzero()[:, 0]
            # 2. If gradients are needed, add the d-logits of the policy loss to those of the
            # divergences, and accumulate dH, dW and db.
            if not self.has_gradient:
                continue
            d = self._gradient_buffer(at.hidden.shape[0])
            if policy is not None:
                d[:count] += d_policy[:count]
            sums.add(chunk, at.hidden, ChunkGradients(d), count, keep)
        return self._finished(sums)

    def _gradient_buffer(self, rows: int) -> Tensor:
        """Return the buffer to which the d-logits of the divergences are written, (rows, V).

        If the teacher has an LM head, the buffer first contains the teacher's logits. If there is
        only one buffer, the d-logits overwrite the student's logits.
        """
        return self.chunk.workspace(rows, self.buffers - 1)

    def _compute_divergences(self, chunk: slice, z: Tensor) -> None:
        """Compute the divergences of a chunk from its raw logits z, (padded C, V)."""
        index = self.rows.active_index
        count = chunk.stop - chunk.start
        at = chunk if index is None else index[chunk]
        teacher = self.teacher.rows(at)
        out = self._gradient_buffer(z.shape[0])
        transform = self.rows.transform.rows(chunk)
        w = self.weights[chunk]
        to = out[:count] if self.has_gradient else None
        if isinstance(teacher, TeacherHead):
            self._teacher_logits(teacher, out)
            of_rows = z[:count], out[:count], w, self.divergence, transform, teacher.transform
            own = joined = self._join_ranks(self.row_kernels.row_divergence_, *of_rows)
            if joined is None or (to is not None and z.shape[1]):
                own = self.row_kernels.row_divergence_(*of_rows, out=to, known=joined)
            values = (joined or own).values  # type: ignore[union-attr]
        else:
            # A top-k teacher has no logits that a kernel could read, so all backends use torch.
            values = row_topk_divergence_(z[:count], teacher, w, self.divergence, transform, out=to)
        self.values[chunk] = values.to(self.values.dtype)

    def _teacher_logits(self, teacher: TeacherHead, out: Tensor) -> None:
        """Compute the teacher's raw logits of the current chunk and write them to `out`."""
        if not out.shape[1]:
            return
        h = pad_rows(teacher.hidden).contiguous()
        dtype = torch.promote_types(h.dtype, torch.float32)
        # If the teacher has a higher precision than the student, use a temporary buffer of that
        # precision.
        to = out if dtype == out.dtype else out.new_empty(out.shape, dtype=dtype)
        matmul_logits(h, teacher.weight, out=to)
        if teacher.bias is not None:
            to.add_(teacher.bias)
        if to is not out:
            out.copy_(to)

    def _join_ranks(
        self, row_divergence_: Callable[..., DivergenceRows], z: Tensor, *of_rows: object
    ) -> DivergenceRows | None:
        """Compute values, centers and lse of full rows if the vocabulary is sharded.

        Two all-gathers exchange the sums of the shards. Without a shard, return None.
        """
        if self.shard is None:
            return None
        has_columns = z.shape[1] > 0
        nothing = z.new_zeros(len(z), dtype=torch.float64)
        none = DivergenceRows(nothing, nothing, nothing - torch.inf, nothing - torch.inf)
        # 1. Process the columns of this rank, and combine the lse values of all ranks into the lse
        # of the full rows.
        own = row_divergence_(z, *of_rows) if has_columns else none
        lses = self.shard.gathered(torch.stack([own.lse, own.teacher_lse])).logsumexp(0)
        full = DivergenceRows(nothing, nothing, *lses)
        # 2. Compute this rank's values and centers with the lse of the full rows, and sum them over
        # all ranks.
        own = row_divergence_(z, *of_rows, known=full) if has_columns else none
        sums = self.shard.gathered(torch.stack([own.values, own.centers])).sum(0)
        return DivergenceRows(*sums, *lses)


def weighted_sum(weights: Tensor, values: Tensor) -> Tensor:  # (T,) each
    """Return Σ weights·D, 0-d fp64. Rows with weight 0 contribute nothing, even if D is NaN."""
    return torch.where(weights == 0, 0.0, weights.double() * values.double()).sum()


def supported_divergence(
    tensors: HeadTensors,
    rows: ActiveRows,
    route: Route,
    *,
    teacher: TeacherHead,
    divergence: Divergence,
    weights: Tensor,  # (T,)
    wanted: Wanted,
    keep_fp32: bool,
    **options: Any,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Compute divergences over token sets, and (dH, dW, db) of their weighted sum.

    If the sets are small, the cost is 8·H·Σ|S| flops, where |S| is the size of a set. A
    `DivergenceHead` computes the rows without a set.

    Returns:
        The divergences, (T,), and the gradients (dH, dW, db).
    """
    # 1. Compute the rows without a token set over the full vocabulary.
    support = rows.support
    assert support is not None
    own = support.select
    others = None
    of_others = None
    if support.dense_index is not None:
        dense = DivergenceHead(
            tensors, rows.select(support.dense_index), route, teacher=teacher,
            divergence=divergence, weights=weights[support.dense_index], has_policy=False,
            keep_fp32=True, **options,
        )  # fmt: skip
        others = dense.sweep(wanted)
        of_others = dense.values
    # 2. For the rows with a set, compute the logits of student and teacher at the ids of the set.
    source = supported_head(tensors, rows, route, keep_fp32=keep_fp32)
    of_teacher = rows._replace(hidden_index=rows.active_index, repeats=False)
    other = supported_head(HeadTensors(*teacher[:3]), of_teacher, route, keep_fp32=True)
    transform = rows.transform.rows(support.row_index)
    z, y = (
        x.rows(transform, return_entropy=False, return_slopes=False).raw for x in (source, other)
    )
    y = y.to(z.dtype)
    # 3. Compute the divergences of these rows. The gradient overwrites the teacher's logits.
    w = own(weights)
    out = y[None] if any(wanted) else None
    each = kernel_module("divergence", route.backend).row_divergence_(
        z[None], y[None], w, divergence, transform, teacher.transform, out=out,
        offsets=support.offsets,
    )  # fmt: skip
    # 4. Merge the divergences of the rows with and without a set, and compute the gradients.
    values = support.merge_rows(each.values.to(w.dtype), of_others)
    if not any(wanted):
        return values, tensors.no_gradients()
    return values, source.gradients(SupportGradient(y, w), wanted, others)
