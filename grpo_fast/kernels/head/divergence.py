"""The term Σ weights·D, where D is the divergence of a row from a teacher.

    student's logits z, teacher's y
    → the divergence kernel overwrites y with its d-logits
    → the policy term, if any, overwrites z with its d-logits
    → the driver adds both, and sums dH = d·W, dW += dᵀ·hidden

The cost is 8·N·V·H flops if the teacher has an LM head of the same hidden size, and 6·N·V·H for a
top-k teacher. A policy loss does not increase it. The workspace takes 8 bytes per logit, or 4 bytes
for a top-k teacher without a policy loss.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from grpo_fast.kernels import divergence_reference
from grpo_fast.kernels.head.products import matmul_logits
from grpo_fast.kernels.head.shards import ShardedHead, gathered
from grpo_fast.kernels.head.sources import Chunk, DenseHead, RowSource
from grpo_fast.kernels.head.sums import ChunkGradients
from grpo_fast.kernels.head.terms import RowTerm, Step, saves_time
from grpo_fast.kernels.route import Route, kernel_module
from grpo_fast.kernels.teachers import DivergenceRows, DivergenceTerm, TeacherHead
from grpo_fast.kernels.types import LogitRows, pad_rows


class Divergences(RowTerm):
    """The divergences D of all rows from a teacher. After the pass, `values` contains them.

    Args:
        term: the teacher of all N rows, and the kind of divergence.
        weights: (T,) fp32. A row with weight 0 has a value but no gradient.
        route: the selected kernels.
        has_gradient: whether d-logits are needed.
    """

    needs_all_rows = True

    def __init__(
        self, term: DivergenceTerm, weights: Tensor, route: Route, *, has_gradient: bool
    ) -> None:
        self.term = term
        self.teacher = term.teacher
        self.weights = weights
        self.route = route
        self.has_gradient = has_gradient
        self.kernels = kernel_module("divergence", route.backend)
        self.values = torch.zeros_like(weights)  # (T,)

    def map(self, select: Callable[[Tensor], Tensor], source: RowSource) -> Divergences:
        return self  # a call with a divergence has one source, which has all rows

    def mask(self, flops: float) -> Tensor | None:
        return self.weights != 0 if saves_time(self.weights, flops) else None

    def step(self, source: RowSource, at: Chunk) -> Step:
        """Compute the divergences of a chunk and their d-logits."""
        w = self.weights[at.rows]
        assert isinstance(source, DenseHead)
        values, d = self._of_vocabulary(source, at, w)
        self.values[at.rows] = values.to(self.values.dtype)
        return Step(ChunkGradients(d) if self.has_gradient else None, w)

    def _of_vocabulary(self, source: DenseHead, at: Chunk, w: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the divergences over the full vocabulary.

        Returns:
            The divergences, (C,), and the buffer of the d-logits, (padded C, V). If the teacher has
            an LM head, the buffer first contains the teacher's logits. If there is only one buffer,
            the d-logits overwrite the student's logits.
        """
        student = source.logit_rows(at, source.logits(at))
        count = len(at.target_ids)
        index = source.rows.active_index
        teacher = self.teacher.rows(at.rows if index is None else index[at.rows])
        out = source.workspace(at.hidden.shape[0], source.buffers - 1)
        to = out[:count] if self.has_gradient else None
        if not isinstance(teacher, TeacherHead):
            # A top-k teacher has no logits that a kernel could read, so all backends use torch.
            of_rows = student, teacher, w, self.term
            return divergence_reference.row_topk_divergence_(*of_rows, out=to), out
        _teacher_logits(teacher, out)
        other = student._replace(logits=out[:count], transform=teacher.transform)
        given = student, other, w, self.term
        joined = None
        if isinstance(source, ShardedHead):
            joined = self._join_ranks(source, *given)
            if to is None or not student.logits.shape[1]:
                return joined.values, out
        found = self.kernels.row_divergence_(*given, out=to, known=joined)
        return (joined or found).values, out

    def _join_ranks(
        self, source: ShardedHead, student: LogitRows, *given: object
    ) -> DivergenceRows:
        """Compute values, centers and lse of full rows if the vocabulary is sharded.

        Two all-gathers exchange the sums of the shards.
        """
        has_columns = student.logits.shape[1] > 0
        nothing = student.logits.new_zeros(len(student.logits), dtype=torch.float64)
        none = DivergenceRows(nothing, nothing, nothing - torch.inf, nothing - torch.inf)
        group = source.shard.group
        # 1. Process the columns of this rank, and combine the lse values of all ranks into the lse
        # of the full rows.
        own = self.kernels.row_divergence_(student, *given) if has_columns else none
        lses = gathered(torch.stack([own.lse, own.teacher_lse]), group).logsumexp(0)
        full = DivergenceRows(nothing, nothing, *lses)
        # 2. Compute this rank's values and centers with the lse of the full rows, and sum them over
        # all ranks.
        own = self.kernels.row_divergence_(student, *given, known=full) if has_columns else none
        sums = gathered(torch.stack([own.values, own.centers]), group).sum(0)
        return DivergenceRows(*sums, *lses)


def _teacher_logits(teacher: TeacherHead, out: Tensor) -> None:
    """Compute the teacher's raw logits of a chunk and write them to `out`."""
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
