"""Divergences of rows of logits from a teacher, in plain torch: the readable reference.

A leaf says what one logit contributes; here are the sums over a row and the gradient
dD/dz_j = slope_j - p_j·Σ_k slope_k.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from grpo_fast.kernels.reference import final_logits, rows_by_length
from grpo_fast.kernels.teachers import Divergence, DivergenceRows, TeacherTopK
from grpo_fast.kernels.types import LogitTransform

# Logits of a block of rows: its temporaries stay in a CPU's cache.
BLOCK = 1 << 17
BLOCK_GPU = 1 << 24


def row_divergence_(
    logits: Tensor,  # (C, V) the student's, raw
    teacher: Tensor,  # (C, V) raw
    weights: Tensor,  # (C,)
    divergence: Divergence,
    transform: LogitTransform,
    teacher_transform: LogitTransform,
    *,
    out: Tensor | None = None,  # (C, V), which may be `teacher`
    known: DivergenceRows | None = None,
    offsets: Tensor | None = None,  # (C+1,): unequal rows one after another in (1, nnz)
) -> DivergenceRows:
    """Divergences of every row, and in `out` the gradient of Σ weights·D by the raw logits.

    Rows of weight 0 have exact zeros; columns at -inf on both sides count for nothing.

    Args:
        known: where the columns are one rank's: `lse` and `teacher_lse` of whole rows, and for
            `out` their `centers`, which are then returned as they came.
    """
    if offsets is not None:
        logits = logits[0]
        teacher = teacher[0]
        out = None if out is None else out[0]
    sums = DivergenceRows(*weights.new_zeros((4, len(weights)), dtype=torch.float64))
    for rows, at in _blocks(logits) if offsets is None else _ragged_blocks(offsets):
        z, chain = final_logits(logits[at], transform.rows(rows))
        y, _ = final_logits(teacher[at], teacher_transform.rows(rows))
        here = known and DivergenceRows(*(x[rows] for x in known))
        lses = (here.lse, here.teacher_lse) if here else (row_lse(z), row_lse(y))
        lp, lq = (_log_probs(x, lse) for x, lse in zip((z, y), lses, strict=True))
        value, slope = _terms(lp, lq, divergence)
        center = slope.sum(-1, dtype=torch.float64)
        if out is not None:
            center = here.centers if here else center
            w = weights[rows, None].to(z.dtype)
            d = torch.where(w == 0, 0.0, _gradient(lp, slope, center) * (w * chain))
            out[at] = d.to(out.dtype)
        for to, x in zip(sums, (value.sum(-1, dtype=torch.float64), center, *lses), strict=True):
            to[rows] = x
    return sums


def row_topk_divergence_(
    logits: Tensor,  # (C, V) raw
    teacher: TeacherTopK,  # of C rows
    weights: Tensor,  # (C,)
    divergence: Divergence,
    transform: LogitTransform,
    *,
    out: Tensor | None,  # (C, V), which may be `logits`
) -> Tensor:  # (C,) fp64
    """The same against K ids and what is left of the vocabulary, K + 1 categories, in fp64; for
    every backend.

    The student's share of all other ids is summed, never 1 - Σ; its derivative goes to these ids
    by their share in it.
    """
    values = []
    for rows, _ in _blocks(logits):
        # 1. The student at the K ids, and its other logits.
        z, chain = final_logits(logits[rows], transform.rows(rows))
        ids = teacher.ids[rows]
        lq = teacher.logps[rows].double()
        is_one = lq > -torch.inf
        at = z.gather(1, ids).double().masked_fill(~is_one, -torch.inf)
        left_out = torch.where(is_one, -torch.inf, torch.inf).to(z.dtype)
        rest = z.scatter_reduce(1, ids, left_out, "amin")  # -inf at the K
        # 2. The mass of all other ids, on both sides, as one more category.
        tail = row_lse(rest)[:, None]
        left = teacher_tail(lq, teacher.floor)[:, None]
        # K = V leaves nothing. A NaN among the others counts without a tail, too: it is to be seen.
        has_tail = tail.isnan() | ((tail > -torch.inf) & teacher.has_tail)
        tails = (x.masked_fill(~has_tail, -torch.inf) for x in (tail, left))
        lp, lq = (torch.cat(x, 1) for x in zip((at, lq), tails, strict=True))
        lp, lq = (_log_probs(x, row_lse(x)) for x in (lp, lq))
        # 3. The divergence of K + 1 categories.
        value, slope = _terms(lp, lq, divergence)
        if out is not None:
            # 4. Its gradient; that of the last category is dealt to the other ids.
            d = _gradient(lp, slope, slope.sum(-1)).to(z.dtype)
            shift = tail.to(z.dtype).masked_fill(~has_tail, torch.inf)
            dz = rest.sub_(shift).exp_().mul_(d[:, -1:])
            dz.scatter_add_(1, ids, torch.where(is_one, d[:, :-1], 0.0))
            w = weights[rows, None].to(z.dtype)
            out[rows] = dz.mul_(w * chain).masked_fill_(w == 0, 0.0)
        values.append(value.sum(-1))
    return torch.cat(values) if values else weights.double()


def teacher_tail(lq: Tensor, floor: float) -> Tensor:
    """(C,) log of what K log-probabilities (C, K) fp64 leave of 1, at least `floor`."""
    return (-torch.expm1(lq.logsumexp(1))).clamp(min=floor).log()


def row_lse(z: Tensor) -> Tensor:
    """(C,) fp64 logsumexp, right to fp32's last digits of 1 - p where one logit has nearly all."""
    high, top = z.max(-1, keepdim=True)
    rest = (z - high.masked_fill(high == -torch.inf, 0.0)).exp().scatter(-1, top, 0.0)
    return (high.double() + rest.sum(-1, keepdim=True, dtype=torch.float64).log1p()).squeeze(-1)


def _blocks(x: Tensor) -> Iterator[tuple[slice, slice]]:
    """Rows, and where they lie in a matrix: there, too."""
    step = max((BLOCK_GPU if x.is_cuda else BLOCK) // max(x.shape[1], 1), 1)
    for start in range(0, x.shape[0], step):
        rows = slice(start, min(start + step, x.shape[0]))
        yield rows, rows


def _ragged_blocks(offsets: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Rows of one length (n,), and where they lie in a vector (n, k)."""
    for here, at in rows_by_length(offsets):
        yield from ((here[rows], at[rows]) for rows, _ in _blocks(at))


def _log_probs(z: Tensor, lse: Tensor) -> Tensor:
    """z - lse, by two differences: a log-probability near 0 keeps its digits."""
    near = lse.to(z.dtype).masked_fill(lse == -torch.inf, 0.0)[:, None]
    rest = (lse[:, None] - near.double()).to(z.dtype)
    return (z - near) - rest.masked_fill(lse[:, None] == -torch.inf, 0.0)


def _terms(lp: Tensor, lq: Tensor, divergence: Divergence) -> tuple[Tensor, Tensor]:
    """(C, V) value and slope of every logit."""
    d = (lp - lq).masked_fill_(lp == lq, 0.0)  # both may be -inf
    return divergence.function(lp.exp(), lq.exp(), d, torch.expm1(-d.abs()))


def _gradient(lp: Tensor, slope: Tensor, center: Tensor) -> Tensor:
    """slope - center·p; of the likeliest logit in a form in which a certain row does not cancel."""
    d = slope - center[:, None].to(slope.dtype) * lp.exp()
    top = lp.argmax(-1, keepdim=True)
    of_top, lp_top = (x.gather(-1, top).double() for x in (slope, lp))
    at_top = -torch.expm1(lp_top) * of_top - lp_top.exp() * (center[:, None] - of_top)
    return d.scatter_(-1, top, at_top.to(d.dtype))
