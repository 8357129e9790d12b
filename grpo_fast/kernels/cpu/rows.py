"""Row kernels in C++ for the CPU: log-probabilities, losses, divergences and token sets.

csrc/api/rows.cpp has the interface of reference.py, csrc/api/divergence.cpp that of
divergence_reference.py, and csrc/api/support.cpp that of support_reference.py.

`row_logps` reads each logit once. `row_grad_` and `row_loss_` read and write each logit once. Each
pass computes one exponential per logit, or two with a soft cap. The bits of a row depend on that
row only.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from grpo_fast.kernels.cpu import loader, loss_codegen
from grpo_fast.kernels.support import HeadRows, SupportRows
from grpo_fast.kernels.teachers import DivergenceRows, DivergenceTerm
from grpo_fast.kernels.types import (
    HeadInputs,
    LogitRows,
    RowLoss,
    RowStats,
    contiguous_rows,
    detached,
    vector,
)
from grpo_fast.objective.coefficients import RowTerms
from grpo_fast.objective.config import LossConfig
from grpo_fast.objective.divergences import DIVERGENCES
from grpo_fast.objective.kl import KL_ESTIMATORS
from grpo_fast.objective.losses import OBJECTIVES


def row_logps(rows: LogitRows, *, return_entropy: bool) -> RowStats:
    """Compute lse, logps and entropies of logits in C++, like `reference.row_logps`.

    The logits are fp32, bf16 or fp16 with any row stride. A target id outside [0, V) is never read,
    and its logp is NaN.
    """
    lse, logps, entropy = loader.operator("rows", "row_logps")(
        detached(rows.logits), rows.target_ids.contiguous(), *rows.transform, return_entropy,
        rows.offsets,
    )  # fmt: skip
    return lse, logps, entropy if return_entropy else None


def row_grad_(
    rows: LogitRows, stats: RowStats, g: Tensor, g_entropy: Tensor | None, out: Tensor | None = None
) -> Tensor:
    """Write the gradient with respect to the logits in C++, like `reference.row_grad_`.

    `g` and `g_entropy` are (C,). `out` is (C, V) and has the dtype of the logits.
    """
    out = rows.logits if out is None else out
    lse, logps, entropy = (vector(x) for x in stats)
    # The kernel reads the entropies only to compute their gradient.
    entropy = None if g_entropy is None else entropy
    loader.operator("rows", "row_grad_")(
        detached(rows.logits), detached(out), rows.target_ids.contiguous(), lse, logps, entropy,
        vector(g), vector(g_entropy), *rows.transform, rows.offsets,
    )  # fmt: skip
    return out


@functools.cache
def function_numbers(loss_type: str, kl_estimator: str) -> tuple[int, int]:
    """Return the numbers of a loss function and of a KL estimator in the generated C++ code."""
    objective = loss_codegen.objective_functions().index(OBJECTIVES[loss_type].function)
    return objective, loss_codegen.kl_functions().index(KL_ESTIMATORS[kl_estimator])


def loss_arguments(config: LossConfig) -> tuple[float, ...]:
    """Return the numeric arguments that describe a loss to the C++ operator.

    Returns:
        (objective, kl, kl_times_ratio, p0, …, p3, kl_max, kl_d_max).
    """
    numbers = function_numbers(config.loss_type, config.kl_estimator)
    # The operator expects exactly MAX_PARAMS hyperparameters, so append zeros.
    params = (*config.params, *[0.0] * loss_codegen.MAX_PARAMS)[: loss_codegen.MAX_PARAMS]
    return *numbers, config.kl_times_ratio, *params, *config.kl_limits


def row_loss_(
    rows: LogitRows, out: Tensor, terms: RowTerms, config: LossConfig, *, return_entropy: bool
) -> RowLoss:
    """Compute the loss of every row and its gradient in C++, like `reference.row_loss_`.

    `out` is (C, V) and has the dtype of the logits. All steps of a row run while the row is in
    cache. The results are bitwise equal to those of separate calls of `row_logps`, the loss
    function and `row_grad_`. The loss function is generated C++ code, and runs in double precision.
    """
    lse, logps, entropy, losses, grad_logps = loader.operator("rows", "row_loss_")(
        detached(rows.logits), detached(out), rows.target_ids.contiguous(), *map(vector, terms),
        *loss_arguments(config), *rows.transform, return_entropy,
    )  # fmt: skip
    return RowLoss(lse, logps, entropy if return_entropy else None, losses, grad_logps)


def row_divergence_(
    student: LogitRows,
    teacher: LogitRows,
    weights: Tensor,  # (C,)
    term: DivergenceTerm,
    *,
    out: Tensor | None = None,  # (C, V)
    known: DivergenceRows | None = None,
) -> DivergenceRows:
    """Compute divergences and their gradient, like `divergence_reference.row_divergence_`.

    The logits are fp32, without `offsets`. `out` must not be the student's logits.
    """
    of_rows = None if known is None else torch.cat(known)
    kind = list(DIVERGENCES).index(term.kind)
    sums = loader.operator("divergence", "row_divergence_")(
        student.logits, teacher.logits, out, vector(weights), of_rows, kind, term.beta,
        *student.transform, *teacher.transform,
    )  # fmt: skip
    return DivergenceRows(*sums.view(4, -1))


# ---- LM head restricted to token sets, with the interface of support_reference.py


def target_places(
    ids: Tensor, offsets: Tensor, target_ids: Tensor, vocab_size: int
) -> tuple[Tensor, Tensor]:
    """Find the position of each target in its token set, in C++.

    `support_reference.target_places` documents the arguments and results.
    """
    operator = loader.operator("support", "support_places")
    found: tuple[Tensor, Tensor] = operator(ids, offsets, target_ids, vocab_size)
    return found


def head_rows(
    p: HeadInputs, rows: SupportRows, *, return_entropy: bool, return_slopes: bool
) -> HeadRows:
    """Compute logits and statistics over token sets in C++, like `support_reference.head_rows`.

    Each weight row is read from memory once.
    """
    raw, lse, logps, entropy, slopes = loader.operator("support", "support_rows")(
        contiguous_rows(p.hidden), contiguous_rows(p.weight), vector(p.bias), rows.ids,
        rows.offsets, p.target_ids, rows.hidden_index, *p.transform, return_entropy, return_slopes,
    )  # fmt: skip
    stats = lse, logps, entropy if return_entropy else None
    return HeadRows(raw, stats, slopes if return_slopes else None)


def head_hidden(d: Tensor, weight: Tensor, rows: SupportRows) -> Tensor:
    """Compute dH in C++ from d-logits of token sets, like `support_reference.head_hidden`."""
    operator = loader.operator("support", "support_hidden")
    out: Tensor = operator(d, contiguous_rows(weight), rows.ids, rows.offsets)
    return out


def head_weight(d: Tensor, hidden: Tensor, rows: SupportRows, out: Tensor, *, add: bool) -> None:
    """Compute dW in C++ from d-logits of token sets, like `support_reference.head_weight`."""
    loader.operator("support", "support_weight_")(
        d, contiguous_rows(hidden), rows.ids, rows.offsets, rows.hidden_index, out, add
    )
