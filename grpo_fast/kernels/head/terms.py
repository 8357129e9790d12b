"""Terms of the loss: from the logits and the statistics of rows to the loss and its d-logits.

    TokenLevel   a token-level policy loss with its KL and its entropy bonus. The coefficients of a
                 row depend on that row only, so one pass computes loss and gradient.
    Known        Σ (g·logp + g_entropy·entropy) with known coefficients. Sequence-level losses and
                 the backward pass of logps use it after a first pass.
    Divergences  Σ weights·D, the divergences from a teacher
    Sum          a sum of two terms, whose d-logits are added before the matrix products

A term has the values of all its rows. The driver selects the rows of a source with `map`.

`Divergences` takes the student's logits z and the teacher's y:

    → the divergence kernel overwrites y with its d-logits
    → the policy term, if any, overwrites z with its d-logits
    → `Sum` adds both
    → the driver computes dH = d·W and dW += dᵀ·hidden

The cost is 8·N·V·H flops if the teacher has an LM head of the same hidden size, and 6·N·V·H for a
top-k teacher. A policy loss does not increase it. The workspace takes 8 bytes per logit, or 4 bytes
for a top-k teacher without a policy loss.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from grpo_fast.kernels import divergence
from grpo_fast.kernels.divergence import DivergenceRows, DivergenceTerm, TeacherHead
from grpo_fast.kernels.head.products import matmul_logits
from grpo_fast.kernels.head.shards import ShardedHead, gathered
from grpo_fast.kernels.head.sources import Chunk, DenseHead, RowSource
from grpo_fast.kernels.head.sums import ChunkGradients
from grpo_fast.kernels.route import Route, kernel_module
from grpo_fast.kernels.types import LogitRows, RowLoss, RowStats, pad_rows, pick
from grpo_fast.objective.coefficients import RowInputs, active_rows
from grpo_fast.objective.config import LossConfig
from grpo_fast.objective.losses import OBJECTIVES

# On a GPU, the host reads the number of active rows only if the gradient GEMMs of all rows take at
# least this many flops, about 1 ms on an H100. For smaller GEMMs, skipping rows does not save
# enough time to pay for the launches that count the rows and for the wait.
READ_FROM = 7e11


class Step(NamedTuple):
    """The gradient of a term in one chunk."""

    d_logits: ChunkGradients | None  # None: no gradient is needed
    g: Tensor  # (C,) coefficients; a row whose coefficients are all 0 has no gradient
    g_entropy: Tensor | None = None  # (C,)

    def active(self) -> Tensor:
        """Return a mask of the rows with a nonzero coefficient, (C,) bool."""
        return active_rows(self.g, self.g_entropy)


class RowTerm:
    """A term of the loss.

    Attributes:
        needs_all_rows: whether a row without gradient must be computed, because it has a value.
        may_hide_nan: whether a row that `mask` excludes may have the coefficient NaN.
        goes_back: whether the last chunk is processed first. The first pass may have stored its
            logits.
    """

    needs_all_rows = False
    may_hide_nan = False
    goes_back = False

    def map(self, select: Callable[[Tensor], Tensor], source: RowSource) -> RowTerm:
        """Return a copy of the term that holds only the values of one source's rows."""
        raise NotImplementedError

    def mask(self, flops: float) -> Tensor | None:
        """Return a mask of the rows that can have a gradient, (T,) bool. None: all, or unknown.

        `flops` is the number of flops of the gradient products of all rows.
        """
        return None

    def step(self, source: RowSource, at: Chunk) -> Step:
        """Compute the values of a chunk and its d-logits."""
        raise NotImplementedError


def saves_time(x: Tensor, flops: float) -> bool:
    """Return whether skipping rows can save time.

    `x` is any tensor on the device of the gradient GEMMs. `flops` is the number of flops of these
    GEMMs for all rows.
    """
    return not x.is_cuda or flops >= READ_FROM


def weighted_sum(weights: Tensor, values: Tensor) -> Tensor:  # (T,) each
    """Return Σ weights·values, 0-d fp64. Rows with weight 0 add nothing, even if they are NaN."""
    return torch.where(weights == 0, 0.0, weights.double() * values.double()).sum()


# ------------------------------------------------------------ Policy losses, and known coefficients
class TokenLevel(RowTerm):
    """A token-level loss. After the pass, `parts` has the `RowLoss` of each chunk.

    Args:
        terms: the per-row inputs of the loss.
        config: the loss.
    """

    needs_all_rows = True
    may_hide_nan = True

    def __init__(self, terms: RowInputs, config: LossConfig) -> None:
        self.terms = terms
        self.config = config
        self.parts: list[RowLoss] = []

    def map(self, select: Callable[[Tensor], Tensor], source: RowSource) -> TokenLevel:
        term = TokenLevel(self.terms.map(select), self.config)
        term.parts = self.parts
        return term

    def mask(self, flops: float) -> Tensor | None:
        """Return a mask of the rows that may have a nonzero coefficient, whatever their logp is.

        On a GPU, rows are selected by advantages and weights, which are known before the pass. A
        row may also have the coefficient 0 because of its logp (by clipping). Such a row stays in
        the GEMMs as zeros, because finding it would make the host wait for the GPU.
        """
        # Keep rows with advantage 0 if there is a KL or entropy term, which also gives them a
        # gradient.
        terms = self.terms
        has_more = terms.kl_weights is not None or terms.grad_entropy is not None
        if has_more or not OBJECTIVES[self.config.loss_type].follows_advantage:
            return None
        if not saves_time(terms.advantages, flops):
            return None
        return torch.logical_and(terms.advantages, terms.policy_weights)

    def step(self, source: RowSource, at: Chunk) -> Step:
        """Compute statistics, losses and d-logits of a chunk."""
        assert isinstance(at.rows, slice)
        here = RowInputs(*pick(at.rows, *self.terms))
        d, part = source.loss(at, here, self.config)
        self.parts.append(part)
        return Step(d, part.grad_logps, here.grad_entropy)


class Known(RowTerm):
    """Σ (g·logp + g_entropy·entropy) with known coefficients.

    Args:
        g: coefficient of each logp, (T,).
        g_entropy: coefficient of each entropy, (T,). None for a term without entropy.
        stats: (lse, logps, entropy) of all rows. The entropy may be None without `g_entropy`.
        counts_on_gpu: whether the host waits for a GPU to count the rows with a coefficient of 0,
            so that these rows can be left out of the products.
    """

    goes_back = True

    def __init__(
        self, g: Tensor, g_entropy: Tensor | None, stats: RowStats, *, counts_on_gpu: bool = True
    ) -> None:
        self.g = g
        self.g_entropy = g_entropy
        self.stats = stats
        self.counts_on_gpu = counts_on_gpu

    def map(self, select: Callable[[Tensor], Tensor], source: RowSource) -> Known:
        g, lse, logps = map(select, (self.g, *self.stats[:2]))
        optional = self.g_entropy, self.stats[2]
        g_entropy, entropy = (None if x is None else select(x) for x in optional)
        return Known(g, g_entropy, (lse, logps, entropy), counts_on_gpu=self.counts_on_gpu)

    def mask(self, flops: float) -> Tensor | None:
        """Return a mask of the rows with a nonzero coefficient."""
        if self.g.is_cuda and not (self.counts_on_gpu and saves_time(self.g, flops)):
            return None
        return active_rows(self.g, self.g_entropy)

    def step(self, source: RowSource, at: Chunk) -> Step:
        """Compute the d-logits of a chunk from the known statistics."""
        g, g_entropy = pick(at.rows, self.g, self.g_entropy)
        known = pick(at.rows, *self.stats)
        d = source.gradients(at, known, g, g_entropy)
        return Step(d, g, g_entropy)


# ----------------------------------------------------------------------- Divergences from a teacher
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
            return divergence.row_topk_divergence_(*of_rows, out=to), out
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


# ------------------------------------------------------------------------------------ Sums of terms
class Sum(RowTerm):
    """The sum of two terms. The first must leave a chunk's logits in the workspace for the second.

    Whether a row has a gradient is known after the pass, so there is no mask.
    """

    def __init__(self, first: RowTerm, second: RowTerm) -> None:
        self.first = first
        self.second = second
        self.needs_all_rows = first.needs_all_rows or second.needs_all_rows
        self.goes_back = second.goes_back

    def map(self, select: Callable[[Tensor], Tensor], source: RowSource) -> Sum:
        return Sum(self.first.map(select, source), self.second.map(select, source))

    def step(self, source: RowSource, at: Chunk) -> Step:
        """Add the d-logits of both terms."""
        a = self.first.step(source, at)
        b = self.second.step(source, at._replace(cached=True))
        if a.d_logits is None or b.d_logits is None:
            return b if a.d_logits is None else a
        count = len(at.target_ids)
        a.d_logits.matrix[:count] += b.d_logits.matrix[:count]
        g = (a.active() | b.active()).float()
        return Step(a.d_logits, g)


def sum_of(first: RowTerm | None, second: RowTerm) -> RowTerm:
    """Return the sum of two terms, of which the first may be None."""
    return second if first is None else Sum(first, second)
