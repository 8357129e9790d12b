"""Compute losses and their gradients from hidden states, logits or logps.

Gradients are computed in the forward pass, for an upstream gradient of 1. `LinearHead` (an LM head)
and `LogitsSweep` (given logits) have the same methods, so `_swept` accepts both.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from grpo_fast.kernels.gpu.capture import refuse
from grpo_fast.kernels.head.divergence import DivergenceHead, supported_divergence, weighted_sum
from grpo_fast.kernels.head.entropy import FullEntropySweep
from grpo_fast.kernels.head.half_range import narrowed, needs_scaling
from grpo_fast.kernels.head.loop import LinearHead
from grpo_fast.kernels.head.support import SupportSweep, linear_sweep
from grpo_fast.kernels.route import head_route, rows_route
from grpo_fast.kernels.teachers import Divergence, DivergenceTerm
from grpo_fast.kernels.types import HeadTensors, Wanted
from grpo_fast.loss import values
from grpo_fast.loss.arguments import Options
from grpo_fast.loss.batch import TokenBatch
from grpo_fast.loss.logits import LogitsSweep
from grpo_fast.objective.coefficients import row_terms, token_loss

UNCHANGED = nullcontext()


class LossResult(NamedTuple):
    """Loss, logps and gradients of a call, for all N rows."""

    loss: Tensor  # 0-d
    logps: Tensor  # (N,)
    entropy: Tensor | None  # (N,)
    gradients: tuple[Tensor, ...]  # (0,) if not needed
    # (2,) metrics of grad_filter: the dropped share of Σ|d-logits|, and the share of the vocabulary
    # columns that were kept
    filtered: Tensor | None = None
    divergence: Tensor | None = None  # (N,) divergence from the teacher
    # (K,) fp32, the factor by which each of the K gradients must be multiplied. None: all factors
    # are 1. See kernels/head/half_range.py.
    units: Tensor | None = None


def kernel_precision(device: torch.device) -> AbstractContextManager[object]:
    """Return a context that disables autocast, so that kernels compute in the input dtypes."""
    if torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return UNCHANGED


Sweep = LinearHead | LogitsSweep | SupportSweep | FullEntropySweep


def linear_loss(
    hidden: Tensor,  # (N, H)
    weight: Tensor,  # (V, H)
    bias: Tensor | None,  # (V,)
    *,
    batch: TokenBatch,
    options: Options,
) -> LossResult:
    """Compute the loss from hidden states. The gradients are (d-hidden, d-weight, d-bias)."""
    refuse("grad_filter", hidden, options.grad_filter)
    refuse("validate", hidden, options.validate, "auto")
    wanted = Wanted(*options.wanted)
    # Sum fp16 gradients in fp32. `rescaled` scales them by a power of two and rounds them once.
    is_half = needs_scaling(hidden.dtype)
    if any(wanted) and is_half:
        batch = batch.with_scaled_weights()
    term = options.divergence
    tensors = HeadTensors(hidden, weight, bias)
    keep_fp32 = is_half or (term is not None and batch.rows.support is not None)
    sweep: dict[str, Any] = dict(
        entropy_gradient=batch.config.entropy_coef != 0, keep_fp32=keep_fp32,
        needs_d_weight=wanted.weight, shard=options.shard,
    )  # fmt: skip
    if term is not None:
        result = _with_divergence(tensors, batch, options, term, wanted, sweep)
    else:
        route = head_route(options.backend, weight, is_shard=options.shard is not None)
        sweep["tolerance"] = options.grad_filter
        sweep["full_entropy"] = batch.config.entropy_over_vocabulary
        result = _swept(linear_sweep(tensors, batch.rows, route, **sweep), batch, options, wanted)
    unit = batch.tokens.unit
    return result if unit is None else rescaled(result, unit, hidden.dtype)


def _with_divergence(
    tensors: HeadTensors,
    batch: TokenBatch,
    options: Options,
    term: DivergenceTerm,
    wanted: Wanted,
    sweep: dict[str, Any],
) -> LossResult:
    """Compute a policy loss plus coef·Σ w·D, the weighted divergence from a teacher.

    Both terms are computed in one pass over the head. If the call has a support, each term needs a
    separate pass, and the gradients of the two passes are added.
    """
    # Pass is_shard=True to select the kernels that work on rows of logits. Divergences cannot use
    # the kernels that compute logps directly from hidden states.
    route = head_route(options.backend, tensors.weight, is_shard=True)
    rows = batch.rows
    weights = term.coef * batch.tokens.token_weights
    kind = Divergence(term.kind, term.beta)
    teacher: dict[str, Any] = dict(teacher=term.teacher, divergence=kind, weights=weights)
    if rows.support is None:
        head = DivergenceHead(tensors, rows, route, **teacher | sweep, has_policy=True)
        result = _swept(head, batch, options, wanted)
        each = head.values
    else:
        sweep["full_entropy"] = batch.config.entropy_over_vocabulary
        result = _swept(linear_sweep(tensors, rows, route, **sweep), batch, options, wanted)
        teacher |= dict(wanted=wanted, keep_fp32=True)
        each, more = supported_divergence(tensors, rows, route, **teacher)
        # Round only the sum of both gradients, because two rounded gradients would have twice the
        # error. In fp16, the sum stays in fp32, because `rescaled` rounds it later.
        likes = tensors if not needs_scaling(tensors[0].dtype) else result.gradients
        gradients = tuple(
            (x + y).to(x.dtype if like is None else like.dtype)
            for x, y, like in zip(result.gradients, more, likes, strict=True)
        )
        result = result._replace(gradients=gradients)
    loss = result.loss + weighted_sum(weights, each).to(result.loss.dtype)
    return result._replace(loss=loss, divergence=rows.to_rows(each))


def rescaled(result: LossResult, unit: Tensor, dtype: torch.dtype) -> LossResult:
    """Divide the loss by `unit`, and round each gradient to `dtype`.

    The token weights of the call were multiplied by `unit`, so loss and gradients contain this
    factor. Each gradient is also scaled by a power of two, so that its largest element fits the
    range of `dtype`. The `units` of the result undo both scales in the backward pass.
    """
    pairs = [narrowed(x, dtype) if x.numel() else (x, unit) for x in result.gradients]
    units = torch.stack([x / unit for _, x in pairs])
    gradients = tuple(x for x, _ in pairs)
    return result._replace(loss=result.loss / unit, gradients=gradients, units=units)


def logits_loss(logits: Tensor, *, batch: TokenBatch, options: Options) -> LossResult:
    """Compute the loss from (N, V) logits.

    The gradients are (d-logits,). With the option `inplace`, they overwrite the logits.
    """
    refuse("validate", logits, options.validate, "auto")
    wanted = Wanted(options.wanted[0], False, False)
    if wanted.hidden and needs_scaling(logits.dtype):
        batch = batch.with_scaled_weights()
    out = logits if options.inplace else None
    route = rows_route(options.backend, logits)
    over_vocabulary = batch.config.entropy_over_vocabulary
    sweep = LogitsSweep.of(logits, out, batch.rows, route, over_vocabulary)
    result = _swept(sweep, batch, options, wanted)
    unit = batch.tokens.unit
    if unit is None:
        return result
    return result._replace(loss=result.loss / unit, units=1 / unit[None])


def _swept(sweep: Sweep, batch: TokenBatch, options: Options, wanted: Wanted) -> LossResult:
    """Compute a loss with a pass over an LM head or over given logits.

    A token-level loss needs one pass, because each row's gradient depends only on that row. Other
    losses first compute the logps of all rows, and then the gradients in a second pass.
    """
    config = batch.config
    tokens = batch.tokens
    with kernel_precision(tokens.advantages.device):
        terms = row_terms(tokens, config)
        # Compute losses and gradients of a token-level loss in one pass.
        if any(wanted) and terms is not None and sweep.num_rows:
            rows, gradients = sweep.loss_gradients(terms, config, wanted)
            values.check_logps(rows.logps, batch.checks)
            loss = rows.losses.sum(dtype=torch.float64)
            if terms.grad_entropy is not None and rows.entropy is not None:
                loss = loss + (terms.grad_entropy * rows.entropy).sum(dtype=torch.float64)
            return _result(loss.float(), rows.logps, rows.entropy, gradients, batch, sweep.filtered)
        # A loss that is not token-level needs the logps of all rows before it can compute a
        # gradient. A call without gradients also uses this path.
        stats = sweep.logps(return_entropy=config.needs_entropy, keep=any(wanted))
        _, logps, entropy = stats
        values.check_logps(logps, batch.checks)
        result = token_loss(logps, entropy, tokens, config)
        gradients = sweep.gradients(result.grad_logps, result.grad_entropy, stats, wanted)
        return _result(result.loss, logps, entropy, gradients, batch, sweep.filtered)


def logps_loss(
    logps: Tensor,  # (N,)
    entropy: Tensor | None,  # (N,)
    *,
    batch: TokenBatch,
    options: Options,
) -> LossResult:
    """Compute the loss from given logps. The gradients are (dL/dlogp, dL/dentropy)."""
    rows = batch.rows
    # Compute in fp32. Copy the inputs, because an output must not share memory with an input.
    # Otherwise, an in-place change of the input would change the output.
    lp = rows.active(logps).to(torch.float32, copy=True)
    h = None if entropy is None else rows.active(entropy).to(torch.float32, copy=True)
    values.check_logps(lp, batch.checks, values.NO_FINITE_LOGP)
    result = token_loss(lp, h, batch.tokens, batch.config)
    has_bonus = result.grad_entropy is not None
    d_entropy = rows.to_rows(result.grad_entropy) if has_bonus else lp.new_empty(0)
    gradients = rows.to_rows(result.grad_logps), d_entropy
    return _result(result.loss, lp, h, gradients, batch)


def _result(
    loss: Tensor,
    logps: Tensor,  # (T,)
    entropy: Tensor | None,  # (T,)
    gradients: tuple[Tensor, ...],
    batch: TokenBatch,
    filtered: Tensor | None = None,
) -> LossResult:
    """Build the result. Logps and entropies are expanded from the T active rows to all N rows."""
    of_rows = batch.rows.to_rows(logps), batch.rows.to_rows(entropy)
    return LossResult(loss, *of_rows, gradients, filtered)
