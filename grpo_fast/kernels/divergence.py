"""Divergences from a teacher: their types, and their computation in plain torch.

`row_divergence_` is the reference implementation. `row_topk_divergence_` is used by all backends.
Each function in DIVERGENCES (objective/kl.py) returns a value and a slope for every logit. The
value is the logit's contribution to the divergence D. This module computes D of a row, and its
gradient with respect to the student's logits z, where p is the softmax of z:

    D = Σ_j value_j,    dD/dz_j = slope_j - p_j·Σ_k slope_k
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from grpo_fast.kernels.reference import final_logits
from grpo_fast.kernels.types import LogitRows, LogitTransform
from grpo_fast.objective.kl import DIVERGENCES


class TeacherHead(NamedTuple):
    """A teacher, given by its hidden states and its LM head.

    The teacher must have the vocabulary of the student. If the vocabularies differ only in padding,
    slice both heads to the shared ids. No gradient flows to the teacher.

    Attributes:
        hidden: (N, H') or (B, L, H'), float. The teacher's hidden states, one row for each row of
            the student. H' and the dtype may differ from the student's.
        weight: (V, H'), float. The weight of the teacher's LM head.
        bias: (V,), float. The bias of the LM head. None: no bias.
        temperature: temperature of the teacher, a number > 0.
        softcap: bound of the logits, a number > 0. None: no bound.
        logit_scale: factor of the logits, not 0.

    Example:
        >>> import torch
        >>> from grpo_fast import TeacherHead
        >>> teacher = TeacherHead(torch.randn(6, 32), torch.randn(100, 32), temperature=0.7)
        >>> teacher.weight.shape
        torch.Size([100, 32])
    """

    hidden: Tensor  # (N, H')
    weight: Tensor  # (V, H')
    bias: Tensor | None = None  # (V,)
    temperature: float = 1.0
    softcap: float | None = None
    logit_scale: float = 1.0

    @property
    def transform(self) -> LogitTransform:
        """Return the transform from the teacher's raw logits to the logits of its distribution."""
        return LogitTransform.of(self.logit_scale, self.softcap, self.temperature)

    def rows(self, rows: Tensor | slice) -> TeacherHead:
        """Return a teacher with only the given rows of hidden states."""
        return self._replace(hidden=self.hidden[rows])


class TeacherTopK(NamedTuple):
    """A teacher, given by K ids and their log-probabilities for every row.

    Inference servers return this form. The log-probabilities must be computed at the temperature of
    the student. Otherwise the divergence is wrong, for example by 0.1 to 0.2 nats if the server
    uses temperature 1 and the student uses 0.7.

    A row in which all log-probabilities are -inf contributes 0, which is useful for masked tokens.
    In every other row, the largest log-probability must be at least -1000, and the probabilities
    must sum to 1 if K = V.

    Attributes:
        ids: (N, K) or (B, L, K), int64 or int32. The ids. An id may occur only once in a row,
            except where the log-probability is -inf.
        logps: (N, K) or (B, L, K), float. The log-probabilities of the ids. -inf marks an unused
            entry.
        has_tail: if True, all other ids form one more category with the remaining probability. If
            False, the logps must be renormalised over the K ids, and the student is renormalised
            as well.
        floor: smallest probability of the tail category, in (0, 1). The teacher's tail is 1 - Σ
            exp(logps). Choose `floor` about as large as the rounding error of this sum, because a
            smaller tail is only noise. If `floor` raises the tail, the teacher's K + 1
            probabilities are divided by their sum.

    Example:
        >>> import torch
        >>> from grpo_fast import TeacherTopK
        >>> logps = torch.log(torch.tensor([[0.6, 0.3], [0.5, 0.2]]))
        >>> teacher = TeacherTopK(ids=torch.tensor([[4, 9], [0, 7]]), logps=logps)
    """

    ids: Tensor  # (N, K) int64; unique in a row, except where the logp is -inf
    logps: Tensor  # (N, K); -inf marks an unused entry
    has_tail: bool = True
    floor: float = 1e-7

    def rows(self, rows: Tensor | slice) -> TeacherTopK:
        """Return a teacher with only the given rows."""
        return self._replace(ids=self.ids[rows], logps=self.logps[rows])


Teacher = TeacherHead | TeacherTopK


class DivergenceTerm(NamedTuple):
    """A divergence term that `linear_grpo_loss(divergence=...)` adds to the loss.

    The term is coef·Σ_t w_t·D_t, where w_t are the token weights of the loss.

    Attributes:
        teacher: a `TeacherHead` or `TeacherTopK` with one row for each target, in the layout of
            target_ids.
        kind: "forward_kl", "reverse_kl" or "jsd" (see `linear_divergence`).
        coef: weight of the term, a number >= 0.
        beta: weight of the teacher in the mixture of "jsd", in (0, 1).

    Example:
        >>> import torch
        >>> from grpo_fast import DivergenceTerm, LossConfig, TeacherHead, linear_grpo_loss
        >>> hidden, weight = torch.randn(6, 16), torch.randn(100, 16)
        >>> teacher = TeacherHead(torch.randn(6, 32), torch.randn(100, 32))
        >>> out = linear_grpo_loss(
        ...     hidden, weight, torch.randint(100, (6,)), torch.ones(2), LossConfig(),
        ...     cu_seqlens=torch.tensor([0, 4, 6]), divergence=DivergenceTerm(teacher, coef=0.1),
        ... )
        >>> out.divergence.shape
        torch.Size([6])
    """

    teacher: Teacher
    kind: str = "reverse_kl"
    coef: float = 1.0
    beta: float = 0.5


class DivergenceRows(NamedTuple):
    """Results of a divergence kernel for every row, (C,) fp64 each."""

    values: Tensor
    centers: Tensor  # Σ_j slope_j, the factor of p in the gradient
    lse: Tensor  # logsumexp of the student's transformed logits
    teacher_lse: Tensor  # logsumexp of the teacher's transformed logits


# ----------------------------------------------------------------------- Divergences in plain torch
# Maximum number of logits that are processed at a time on a CPU and on a GPU. On a CPU, the
# temporary tensors of one block then fit into the cache.
BLOCK = 1 << 17
BLOCK_GPU = 1 << 24


def row_divergence_(
    student: LogitRows,
    teacher: LogitRows,
    weights: Tensor,  # (C,)
    term: DivergenceTerm,
    *,
    out: Tensor | None = None,  # (C, V)
    known: DivergenceRows | None = None,
) -> DivergenceRows:
    """Compute the divergence D of every row and, if `out` is given, the gradient of Σ weights·D.

    The gradient is with respect to the student's raw logits. It is exactly 0 in rows with weight 0.
    Columns where both logits are -inf contribute nothing.

    Args:
        student: the student's logits, without `offsets`.
        teacher: the teacher's logits, in the same form.
        weights: (C,) weight of each row in the gradient.
        term: the kind of divergence and its parameter.
        out: (C, V) destination of the gradient, which may be the teacher's logits; None: no
            gradient.
        known: results over full rows, or None. A rank with a vocabulary shard must pass the `lse`
            and `teacher_lse` of the full rows, and also their `centers` if `out` is given.

    Returns:
        The sums of every row, (C,) fp64 each.
    """
    # Use fp64, because a divergence close to 0 is a sum of terms that nearly cancel.
    sums = DivergenceRows(*weights.new_zeros((4, len(weights)), dtype=torch.float64))
    for rows in _blocks(student.logits):
        z, chain = final_logits(student.logits[rows], student.transform)
        y, _ = final_logits(teacher.logits[rows], teacher.transform)
        # A rank with a vocabulary shard has only a part of each row. Use the lse of the full row,
        # so that the probabilities are those of the full softmax.
        here = known and DivergenceRows(*(x[rows] for x in known))
        lses = (here.lse, here.teacher_lse) if here else (row_lse(z), row_lse(y))
        lp, lq = (_log_probs(x, lse) for x, lse in zip((z, y), lses, strict=True))
        value, slope = _values_and_slopes(lp, lq, term)
        center = slope.sum(-1, dtype=torch.float64)
        if out is not None:
            center = here.centers if here else center
            w = weights[rows, None].to(z.dtype)
            # Set rows with weight 0 to 0 with torch.where. A product would keep NaN, because 0·NaN
            # is NaN.
            d = torch.where(w == 0, 0.0, _gradient(lp, slope, center) * (w * chain))
            out[rows] = d.to(out.dtype)
        for to, x in zip(sums, (value.sum(-1, dtype=torch.float64), center, *lses), strict=True):
            to[rows] = x
    return sums


def row_topk_divergence_(
    student: LogitRows,
    teacher: TeacherTopK,  # of C rows
    weights: Tensor,  # (C,)
    term: DivergenceTerm,
    *,
    out: Tensor | None,  # (C, V)
) -> Tensor:
    """Compute divergences from a teacher's top-k log-probabilities in fp64.

    The vocabulary is reduced to K + 1 categories: the K ids, and one tail category for all other
    ids. The student's tail probability is summed over the tail ids, because 1 - Σ p would suffer
    from cancellation. The gradient of the tail is distributed over the tail ids in proportion to
    their probabilities.

    Args:
        student: the student's logits, without `offsets`.
        teacher: ids and logps of the C rows.
        weights: (C,) weight of each row in the gradient.
        term: the kind of divergence and its parameter.
        out: (C, V) destination of the gradient, which may be the logits; None: no gradient.

    Returns:
        The divergence of every row, (C,) fp64.
    """
    values = []
    for rows in _blocks(student.logits):
        # 1. Separate the student's logits at the K ids from those of the tail, the other ids.
        z, chain = final_logits(student.logits[rows], student.transform)
        ids = teacher.ids[rows]
        lq = teacher.logps[rows].double()
        is_one = lq > -torch.inf
        # Unused entries have a teacher log-probability of -inf. Mask them, so that the student's
        # probability of their ids is part of the tail.
        at = z.gather(1, ids).double().masked_fill(~is_one, -torch.inf)
        left_out = torch.where(is_one, -torch.inf, torch.inf).to(z.dtype)
        rest = z.scatter_reduce(1, ids, left_out, "amin")  # -inf in columns of the teacher's ids
        # 2. Append the log-probability of the tail as one more category, for student and teacher.
        tail = row_lse(rest)[:, None]
        left = teacher_tail(lq, teacher.floor)[:, None]
        # If K = V, the tail of the student is empty and must not become a category. A tail of NaN
        # must always become one, so that a NaN among the student's logits reaches the result.
        has_tail = tail.isnan() | ((tail > -torch.inf) & teacher.has_tail)
        tails = (x.masked_fill(~has_tail, -torch.inf) for x in (tail, left))
        lp, lq = (torch.cat(x, 1) for x in zip((at, lq), tails, strict=True))
        lp, lq = (_log_probs(x, row_lse(x)) for x in (lp, lq))
        # 3. Compute the divergence over the K + 1 categories.
        value, slope = _values_and_slopes(lp, lq, term)
        if out is not None:
            # 4. Compute the gradient, and distribute the gradient of the tail over the tail ids.
            d = _gradient(lp, slope, slope.sum(-1)).to(z.dtype)
            shift = tail.to(z.dtype).masked_fill(~has_tail, torch.inf)
            dz = rest.sub_(shift).exp_().mul_(d[:, -1:])
            dz.scatter_add_(1, ids, torch.where(is_one, d[:, :-1], 0.0))
            w = weights[rows, None].to(z.dtype)
            out[rows] = dz.mul_(w * chain).masked_fill_(w == 0, 0.0)
        values.append(value.sum(-1))
    return torch.cat(values) if values else weights.double()


def teacher_tail(lq: Tensor, floor: float) -> Tensor:
    """Return the log of the probability that a teacher gives to all ids outside its top k.

    The probability is 1 - Σ exp(lq), but at least `floor`, because a very small difference is
    mostly rounding error.

    Args:
        lq: (C, K) fp64 log-probabilities of the top-k ids.
        floor: smallest probability of the other ids.
    """
    return (-torch.expm1(lq.logsumexp(1))).clamp(min=floor).log()


def row_lse(z: Tensor) -> Tensor:
    """Return the (C,) fp64 logsumexp of the rows.

    The largest term is left out of the sum and added with log1p. The result is therefore accurate
    even if one logit has nearly all of the probability.
    """
    # In a row of -inf, subtract 0 instead of the maximum, because -inf - (-inf) is NaN.
    high, top = z.max(-1, keepdim=True)
    rest = (z - high.masked_fill(high == -torch.inf, 0.0)).exp().scatter(-1, top, 0.0)
    return (high.double() + rest.sum(-1, keepdim=True, dtype=torch.float64).log1p()).squeeze(-1)


def _blocks(x: Tensor) -> Iterator[slice]:
    """Split the rows of a matrix x into blocks."""
    # A block has at least one row, even if a single row exceeds the block size.
    step = max((BLOCK_GPU if x.is_cuda else BLOCK) // max(x.shape[1], 1), 1)
    for start in range(0, x.shape[0], step):
        yield slice(start, min(start + step, x.shape[0]))


def _log_probs(z: Tensor, lse: Tensor) -> Tensor:
    """Return the log-probabilities z - lse, in the dtype of z.

    The fp64 lse is subtracted in two steps, so that a log-probability near 0 keeps its digits.
    """
    # Split the fp64 lse into a number that the dtype of z can represent, and a remainder.
    near = lse.to(z.dtype).masked_fill(lse == -torch.inf, 0.0)[:, None]
    rest = (lse[:, None] - near.double()).to(z.dtype)
    return (z - near) - rest.masked_fill(lse[:, None] == -torch.inf, 0.0)


def _values_and_slopes(lp: Tensor, lq: Tensor, term: DivergenceTerm) -> tuple[Tensor, Tensor]:
    """Return the value and the slope of the divergence for every logit, (C, V) each."""
    # Where both are -inf, set the difference to 0, because -inf - (-inf) is NaN.
    d = (lp - lq).masked_fill_(lp == lq, 0.0)
    near = torch.expm1(-d.abs())
    return DIVERGENCES[term.kind](lp.exp(), lq.exp(), d, near, beta=term.beta)


def _gradient(lp: Tensor, slope: Tensor, center: Tensor) -> Tensor:
    """Return slope - center·p, the gradient of the divergence with respect to the logits.

    For the student's most likely logit, use a formula without cancellation.
    """
    d = slope - center[:, None].to(slope.dtype) * lp.exp()
    # (1 - p)·slope - p·(center - slope) equals slope - center·p, but stays accurate as p → 1.
    top = lp.argmax(-1, keepdim=True)
    of_top, lp_top = (x.gather(-1, top).double() for x in (slope, lp))
    at_top = -torch.expm1(lp_top) * of_top - lp_top.exp() * (center[:, None] - of_top)
    return d.scatter_(-1, top, at_top.to(d.dtype))
