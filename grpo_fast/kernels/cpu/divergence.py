"""Divergences of rows of logits from a teacher, in C++: the doors of divergence_reference.py."""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_fast.kernels.cpu import loader
from grpo_fast.kernels.divergence_reference import teacher_tail
from grpo_fast.kernels.teachers import Divergence, DivergenceRows, TeacherTopK
from grpo_fast.kernels.types import LogitRule, rule_arguments, vector
from grpo_fast.objective.divergences import DIVERGENCES


def row_divergence_(
    logits: Tensor,  # (C, V) fp32
    teacher: Tensor,  # (C, V) fp32
    weights: Tensor,  # (C,)
    divergence: Divergence,
    rule: LogitRule,
    teacher_rule: LogitRule,
    *,
    out: Tensor | None = None,  # (C, V), which may be `teacher`
    known: DivergenceRows | None = None,
    offsets: Tensor | None = None,  # (C+1,): unequal rows one after another in (1, nnz)
) -> DivergenceRows:
    """See divergence_reference.row_divergence_; `out` must not be the logits."""
    of_rows = None if known is None else torch.cat(known)
    sums = loader.door("divergence", "row_divergence_")(
        logits, teacher, out, vector(weights), of_rows, _number(divergence), divergence.beta,
        *rule_arguments(rule), *rule_arguments(teacher_rule)[:3], offsets,
    )  # fmt: skip
    return DivergenceRows(*sums.view(4, -1))


def row_topk_divergence_(
    logits: Tensor,  # (C, V) fp32
    teacher: TeacherTopK,  # of C rows
    weights: Tensor,  # (C,)
    divergence: Divergence,
    rule: LogitRule,
    *,
    out: Tensor | None,  # (C, V), which may be `logits`
) -> Tensor:  # (C,) fp64
    lq = teacher.logps.double()
    left = teacher_tail(lq, teacher.floor) if teacher.has_tail else lq[:, 0] * 0 - torch.inf
    return loader.door("divergence", "row_topk_divergence_")(
        logits, out, teacher.ids.contiguous(), lq.contiguous(), left, vector(weights),
        _number(divergence), divergence.beta, *rule_arguments(rule),
    )  # fmt: skip


def _number(divergence: Divergence) -> int:
    return list(DIVERGENCES).index(divergence.kind)
