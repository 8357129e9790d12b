"""Divergences between rows of logits and a teacher's logits, in C++ (csrc/api/divergence.cpp)."""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_fast.kernels.cpu import loader
from grpo_fast.kernels.teachers import Divergence, DivergenceRows
from grpo_fast.kernels.types import LogitTransform, transform_arguments, vector
from grpo_fast.objective.divergences import DIVERGENCES


def row_divergence_(
    logits: Tensor,  # (C, V) fp32
    teacher: Tensor,  # (C, V) fp32
    weights: Tensor,  # (C,)
    divergence: Divergence,
    transform: LogitTransform,
    teacher_transform: LogitTransform,
    *,
    out: Tensor | None = None,  # (C, V), which may be `teacher`
    known: DivergenceRows | None = None,
    offsets: Tensor | None = None,  # (C+1,) bounds of unequal rows in (1, nnz)
) -> DivergenceRows:
    """Compute divergences and their gradient, like `divergence_reference.row_divergence_`.

    `out` must not be the student's logits.
    """
    of_rows = None if known is None else torch.cat(known)
    kind = list(DIVERGENCES).index(divergence.kind)
    sums = loader.operator("divergence", "row_divergence_")(
        logits, teacher, out, vector(weights), of_rows, kind, divergence.beta,
        *transform_arguments(transform), *transform_arguments(teacher_transform)[:3], offsets,
    )  # fmt: skip
    return DivergenceRows(*sums.view(4, -1))
