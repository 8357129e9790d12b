"""Compute losses and their gradients from hidden states, logits or logps.

Gradients are computed in the forward pass, for an upstream gradient of 1.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from grpo_fast.kernels.gpu.capture import refuse
from grpo_fast.kernels.head.divergence import Divergences, buffers_of
from grpo_fast.kernels.head.driver import Driver, linear_driver, logits_driver
from grpo_fast.kernels.head.sums import narrowed, needs_scaling
from grpo_fast.kernels.head.terms import Known, TokenLevel, sum_of, weighted_sum
from grpo_fast.kernels.route import head_route, rows_route
from grpo_fast.kernels.teachers import Divergence
from grpo_fast.kernels.types import HeadTensors, Wanted
from grpo_fast.loss import values
from grpo_fast.loss.arguments import Options
from grpo_fast.loss.batch import TokenBatch
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
    # are 1. See kernels/head/sums.py.
    units: Tensor | None = None


def kernel_precision(device: torch.device) -> AbstractContextManager[object]:
    """Return a context that disables autocast, so that kernels compute in the input dtypes."""
    if torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return UNCHANGED


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
    # Divergences need rows of logits, as a vocabulary shard does. They cannot use the kernels that
    # compute logps directly from hidden states.
    needs_rows = options.shard is not None or term is not None
    route = head_route(options.backend, weight, is_shard=needs_rows)
    support = batch.rows.support
    full_entropy = batch.config.entropy_over_vocabulary and support is not None
    divergences = None
    if term is not None:
        divergences = Divergences(
            term.teacher, Divergence(term.kind, term.beta),
            term.coef * batch.tokens.token_weights, route, has_gradient=any(wanted),
            set_rows=support.row_index if full_entropy and support is not None else None,
        )  # fmt: skip
    driver = linear_driver(
        HeadTensors(hidden, weight, bias), batch.rows, route, shard=options.shard,
        entropy_gradient=batch.config.entropy_coef != 0, full_entropy=full_entropy,
        keep_fp32=is_half, needs_d_weight=wanted.weight, tolerance=options.grad_filter,
        buffers=1 if term is None else buffers_of(term.teacher, has_policy=True),
        adds_terms=term is not None,
    )  # fmt: skip
    result = driven(driver, batch, wanted, divergences)
    unit = batch.tokens.unit
    return result if unit is None else rescaled(result, unit, hidden.dtype)


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
    driver = logits_driver(
        logits, logits if options.inplace else None, batch.rows,
        rows_route(options.backend, logits), full_entropy=batch.config.entropy_over_vocabulary,
    )  # fmt: skip
    result = driven(driver, batch, wanted)
    unit = batch.tokens.unit
    if unit is None:
        return result
    return result._replace(loss=result.loss / unit, units=1 / unit[None])


def driven(
    driver: Driver, batch: TokenBatch, wanted: Wanted, divergences: Divergences | None = None
) -> LossResult:
    """Compute a loss and its gradients with a driver.

    A token-level loss needs one pass, because each row's gradient depends only on that row. Other
    losses first compute the logps of all rows, and then the gradients in a second pass.
    """
    config = batch.config
    tokens = batch.tokens
    with kernel_precision(tokens.advantages.device):
        terms = row_terms(tokens, config)
        if any(wanted) and terms is not None and driver.num_rows:
            # 1. Compute losses and gradients of a token-level loss in one pass.
            rows, gradients = driver.token_level(TokenLevel(terms, config), divergences, wanted)
            logps, entropy = rows.logps, rows.entropy
            values.check_logps(logps, batch.checks)
            loss = rows.losses.sum(dtype=torch.float64)
            if terms.grad_entropy is not None and entropy is not None:
                loss = loss + (terms.grad_entropy * entropy).sum(dtype=torch.float64)
            loss = loss.float()
        else:
            # 2. Other losses need the logps of all rows before they can compute a gradient. A call
            # without gradients also uses this path.
            stats = driver.logps(return_entropy=config.needs_entropy, stores=any(wanted))
            _, logps, entropy = stats
            values.check_logps(logps, batch.checks)
            result = token_loss(logps, entropy, tokens, config)
            loss = result.loss
            known = Known(result.grad_logps, result.grad_entropy, stats)
            term = sum_of(divergences, known) if any(wanted) else divergences or known
            gradients = driver.gradients(term, wanted)
    each = None
    if divergences is not None:
        loss = loss + weighted_sum(divergences.weights, divergences.values).to(loss.dtype)
        each = batch.rows.to_rows(divergences.values)
    found = _result(loss, logps, entropy, gradients, batch, driver.filtered)
    return found._replace(divergence=each)


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
