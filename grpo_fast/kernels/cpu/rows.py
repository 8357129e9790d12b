"""Kernels in C++ for the CPU: log-probabilities, losses, divergences, token sets and the LM head.

csrc/api/rows.cpp has the interface of reference.py, csrc/api/divergence.cpp that of
kernels/divergence.py, and csrc/api/support.cpp that of kernels/support.py.

`row_logps` reads each logit once. `row_grad_` and `row_loss_` read and write each logit once. Each
pass computes one exponential per logit, or two with a soft cap. The bits of a row depend on that
row only.

csrc/api/linear.cpp fuses the LM head with log-softmax:

    raw = hidden · Wᵀ + bias,  z = transform(raw)  ->  lse, logp, entropy, optionally exponentials

The kernel sums the softmax statistics of a block of logits while the block is in cache. A pass
without gradients therefore stores no logits. A pass with gradients writes one exponential per
logit. An exponential is the gradient with respect to its logit, divided by a factor that all
columns of the row share. gpu/linear.py derives this.

Each block of W is read from memory once per group of rows. A stored exponential takes 4 bytes for
fp32 inputs, and 2 bytes for bf16 inputs (POSITIVE16, which has two more significant bits than
bf16). Exponentials that make up more than 1/16 of their row are also returned in fp32.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from grpo_fast.kernels.cpu import loader, loss_codegen
from grpo_fast.kernels.cpu.gemm import uses_tiles
from grpo_fast.kernels.divergence import DivergenceRows, DivergenceTerm
from grpo_fast.kernels.types import (
    POSITIVE16,
    Dominant,
    Exponentials,
    HeadInputs,
    HeadRows,
    LogitRows,
    RowLoss,
    RowStats,
    SupportRows,
    contiguous_rows,
    detached,
    vector,
)
from grpo_fast.objective.coefficients import RowInputs
from grpo_fast.objective.config import LossConfig
from grpo_fast.objective.kl import DIVERGENCES, KL_ESTIMATORS
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
    rows: LogitRows, out: Tensor, terms: RowInputs, config: LossConfig, *, return_entropy: bool
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
    """Compute divergences and their gradient, like `divergence.row_divergence_`.

    The logits are fp32, without `offsets`. `out` must not be the student's logits.
    """
    of_rows = None if known is None else torch.cat(known)
    kind = list(DIVERGENCES).index(term.kind)
    sums = loader.operator("divergence", "row_divergence_")(
        student.logits, teacher.logits, out, vector(weights), of_rows, kind, term.beta,
        *student.transform, *teacher.transform,
    )  # fmt: skip
    return DivergenceRows(*sums.view(4, -1))


# ----------------------------------------------------------------- LM head restricted to token sets


def target_places(
    ids: Tensor, offsets: Tensor, target_ids: Tensor, vocab_size: int
) -> tuple[Tensor, Tensor]:
    """Find the position of each target in its token set, in C++.

    `support.target_places` documents the arguments and results.
    """
    operator = loader.operator("support", "support_places")
    found: tuple[Tensor, Tensor] = operator(ids, offsets, target_ids, vocab_size)
    return found


def head_rows(
    p: HeadInputs, rows: SupportRows, *, return_entropy: bool, return_slopes: bool
) -> HeadRows:
    """Compute logits and statistics over token sets in C++, like `support.head_rows`.

    Each weight row is read from memory once.
    """
    raw, lse, logps, entropy, slopes = loader.operator("support", "support_rows")(
        contiguous_rows(p.hidden), contiguous_rows(p.weight), vector(p.bias), rows.ids,
        rows.offsets, p.target_ids, rows.hidden_index, *p.transform, return_entropy, return_slopes,
    )  # fmt: skip
    stats = lse, logps, entropy if return_entropy else None
    return HeadRows(raw, stats, slopes if return_slopes else None)


def head_hidden(d: Tensor, weight: Tensor, rows: SupportRows) -> Tensor:
    """Compute dH in C++ from d-logits of token sets, like `support.head_hidden`."""
    operator = loader.operator("support", "support_hidden")
    out: Tensor = operator(d, contiguous_rows(weight), rows.ids, rows.offsets)
    return out


def head_weight(d: Tensor, hidden: Tensor, rows: SupportRows, out: Tensor, *, add: bool) -> None:
    """Compute dW in C++ from d-logits of token sets, like `support.head_weight`."""
    loader.operator("support", "support_weight_")(
        d, contiguous_rows(hidden), rows.ids, rows.offsets, rows.hidden_index, out, add
    )


# ----------------------------------------------------------------------- LM head from hidden states
def _tensors(p: HeadInputs) -> tuple[Tensor | None, ...]:
    """Return hidden, weight, bias and target ids in the form that the C++ operator requires."""
    hidden = contiguous_rows(p.hidden)
    weight = contiguous_rows(p.weight)
    return hidden, weight, vector(p.bias), p.target_ids.contiguous()


def head_logps(
    p: HeadInputs, *, return_entropy: bool, logits_out: Tensor | None = None
) -> RowStats:
    """Compute the lse, the target's log-probability and, if requested, the entropy of every row.

    The result equals `row_logps(hidden @ weight.T + bias, …)`. A target id outside [0, V) is never
    read, and its logp is NaN.

    Args:
        p: the hidden states, the LM head and the targets, in fp32 or bf16.
        return_entropy: also compute the entropy.
        logits_out: (T, V) fp32 destination of the raw logits. The results are bitwise identical
            with and without it.

    Returns:
        lse, logps and entropy (or None), (T,) fp32 each.
    """
    # Pass False and twice None: no exponentials, and no statistics from an earlier call.
    lse, logps, entropy, *_ = loader.operator("linear", "linear_rows")(
        *_tensors(p), logits_out, False, None, None, *p.transform, return_entropy,
        uses_tiles(p.weight),
    )  # fmt: skip
    return lse, logps, entropy if return_entropy else None


def head_exponentials(
    p: HeadInputs, out: Tensor, *, return_entropy: bool = False, known: RowStats | None = None
) -> Exponentials:
    """Compute the statistics of `head_logps` and write the `Exponentials` E to `out`.

    Elements of a 16-bit E that make up more than 1/16 of their row are also returned in fp32.

    Args:
        p: the hidden states, the LM head and the targets.
        out: (T, V) fp32 or POSITIVE16, any row stride.
        return_entropy: also compute the entropy.
        known: statistics of these rows from an earlier call, which are then not computed again.
            `out` is bitwise identical with and without this argument.
    """
    given = (None, None) if known is None else (vector(known[0]), vector(known[1]))
    lse, logps, entropy, unit, target_unit, *dominant = loader.operator("linear", "linear_rows")(
        *_tensors(p), out, True, *given, *p.transform, return_entropy, uses_tiles(p.weight),
    )  # fmt: skip
    stats = known if known is not None else (lse, logps, entropy if return_entropy else None)
    found = Dominant(*dominant) if out.dtype == POSITIVE16 else None
    return Exponentials(stats, unit, target_unit, found)
