"""The passes behind the public functions: hidden, logits or logps in; loss and gradients out.

Gradients are formed in the forward, for an upstream gradient of 1. A sweep goes through the rows of
a head (`LinearHead`) or of given logits (`LogitsSweep`); both have the same three methods.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from grpo_fast.kernels.gpu.capture import refuse
from grpo_fast.kernels.head.divergence import DivergenceHead, supported_divergence, weighted_sum
from grpo_fast.kernels.head.entropy import WholeEntropy
from grpo_fast.kernels.head.half_range import narrowed, needs_range
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
    loss: Tensor  # 0-d
    logps: Tensor  # (N,)
    entropy: Tensor | None  # (N,)
    gradients: tuple[Tensor, ...]  # (0,) where nobody wants one
    filtered: Tensor | None = None  # (2,) what grad_filter left out (kernels/head/grad_filter.py)
    divergence: Tensor | None = None  # (N,) of a teacher (kernels/head/divergence.py)
    # (K,) fp32: what each gradient is to be multiplied by (kernels/head/half_range.py).
    units: Tensor | None = None


def kernel_precision(device: torch.device) -> AbstractContextManager[object]:
    """Autocast does not reach the kernels: they compute in the dtypes they are given."""
    if torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return UNCHANGED


Sweep = LinearHead | LogitsSweep | SupportSweep | WholeEntropy


def linear_loss(
    hidden: Tensor,  # (N, H)
    weight: Tensor,  # (V, H)
    bias: Tensor | None,  # (V,)
    *,
    batch: TokenBatch,
    options: Options,
) -> LossResult:
    """hidden → loss; gradients are (dH, dW, db)."""
    refuse("grad_filter", hidden, options.grad_filter)
    refuse("validate", hidden, options.validate, "auto")
    wanted = Wanted(*options.wanted)
    is_half = needs_range(hidden.dtype)
    has_units = any(wanted) and is_half
    batch = batch.in_range() if has_units else batch
    term = options.divergence
    tensors = HeadTensors(hidden, weight, bias)
    is_wide = is_half or (term is not None and batch.rows.support is not None)
    sweep: dict[str, Any] = dict(
        entropy_gradient=batch.config.entropy_coef != 0, is_wide=is_wide,
        wants_weight=wanted.weight, shard=options.shard,
    )  # fmt: skip
    if term is not None:
        result = _with_divergence(tensors, batch, options, term, wanted, sweep)
    else:
        route = head_route(options.backend, weight, is_shard=options.shard is not None)
        sweep["tolerance"] = options.grad_filter
        sweep["whole_entropy"] = batch.config.entropy_over_vocabulary
        result = _swept(linear_sweep(tensors, batch.rows, route, **sweep), batch, options, wanted)
    unit = batch.tokens.unit
    return result if unit is None else in_units(result, unit, hidden.dtype)


def _with_divergence(
    tensors: HeadTensors,
    batch: TokenBatch,
    options: Options,
    term: DivergenceTerm,
    wanted: Wanted,
    sweep: dict[str, Any],
) -> LossResult:
    """The loss and coef·Σ w·D: one pass; over a sampler's sets one after the other."""
    route = head_route(options.backend, tensors.weight, is_shard=True)
    rows = batch.rows
    weights = term.coef * batch.tokens.token_weights
    kind = Divergence(term.kind, term.beta)
    own: dict[str, Any] = dict(teacher=term.teacher, divergence=kind, weights=weights)
    if rows.support is None:
        head = DivergenceHead(tensors, rows, route, **own | sweep, has_policy=True)
        result = _swept(head, batch, options, wanted)
        each = head.values
    else:
        sweep["whole_entropy"] = batch.config.entropy_over_vocabulary
        result = _swept(linear_sweep(tensors, rows, route, **sweep), batch, options, wanted)
        own |= dict(wanted=wanted, is_wide=True)
        each, more = supported_divergence(tensors, rows, route, **own)
        likes = tensors if not needs_range(tensors[0].dtype) else result.gradients
        gradients = tuple(
            (x + y).to(x.dtype if like is None else like.dtype)
            for x, y, like in zip(result.gradients, more, likes, strict=True)
        )
        result = result._replace(gradients=gradients)
    loss = result.loss + weighted_sum(weights, each).to(result.loss.dtype)
    return result._replace(loss=loss, divergence=rows.to_rows(each))


def in_units(result: LossResult, unit: Tensor, dtype: torch.dtype) -> LossResult:
    """Take `unit` out of the loss; gradients in `dtype`, each beside a unit of its own."""
    pairs = [narrowed(x, dtype) if x.numel() else (x, unit) for x in result.gradients]
    units = torch.stack([x / unit for _, x in pairs])
    gradients = tuple(x for x, _ in pairs)
    return result._replace(loss=result.loss / unit, gradients=gradients, units=units)


def logits_loss(logits: Tensor, *, batch: TokenBatch, options: Options) -> LossResult:
    """(N, V) logits → loss; the gradient is (d-logits,), over the logits where `inplace`."""
    refuse("validate", logits, options.validate, "auto")
    wanted = Wanted(options.wanted[0], False, False)
    has_units = wanted.hidden and needs_range(logits.dtype)
    batch = batch.in_range() if has_units else batch
    out = logits if options.inplace else None
    route = rows_route(options.backend, logits)
    whole = batch.config.entropy_over_vocabulary
    sweep = LogitsSweep.of(logits, out, batch.rows, route, whole)
    result = _swept(sweep, batch, options, wanted)
    unit = batch.tokens.unit
    if unit is None:
        return result
    return result._replace(loss=result.loss / unit, units=1 / unit[None])


def _swept(sweep: Sweep, batch: TokenBatch, options: Options, wanted: Wanted) -> LossResult:
    """One sweep where the coefficients follow row by row, two where they need all rows' logps."""
    config = batch.config
    tokens = batch.tokens
    with kernel_precision(tokens.advantages.device):
        terms = row_terms(tokens, config)
        if any(wanted) and terms is not None and sweep.num_rows:
            rows, gradients = sweep.loss_gradients(terms, config, wanted)
            values.check_logps(rows.logps, options.validate)
            loss = rows.losses.sum(dtype=torch.float64)
            if terms.grad_entropy is not None and rows.entropy is not None:
                loss = loss + (terms.grad_entropy * rows.entropy).sum(dtype=torch.float64)
            return _result(loss.float(), rows.logps, rows.entropy, gradients, batch, sweep.filtered)
        stats = sweep.logps(return_entropy=config.needs_entropy, keep=any(wanted))
        values.check_logps(stats[1], options.validate)
        result = token_loss(stats[1], stats[2], tokens, config)
        gradients = sweep.gradients(result.grad_logps, result.grad_entropy, stats, wanted)
        return _result(result.loss, stats[1], stats[2], gradients, batch, sweep.filtered)


def logps_loss(
    logps: Tensor,  # (N,)
    entropy: Tensor | None,  # (N,)
    *,
    batch: TokenBatch,
    options: Options,
) -> LossResult:
    """logps → loss; gradients are (dL/dlogp, dL/dentropy)."""
    rows = batch.rows
    lp = rows.active(logps)
    h = rows.active(entropy)
    values.check_logps(lp, "auto", values.NO_FINITE_LOGP)
    result = token_loss(lp, h, batch.tokens, batch.config)
    has_bonus = result.grad_entropy is not None
    d_entropy = rows.to_rows(result.grad_entropy) if has_bonus else logps.new_empty(0)
    gradients = rows.to_rows(result.grad_logps), d_entropy
    # An output never shares memory with an input.
    own = (lp.clone(), None if h is None else h.clone())
    return _result(result.loss, *own, gradients, batch)


def _result(
    loss: Tensor,
    logps: Tensor,  # (T,)
    entropy: Tensor | None,  # (T,)
    gradients: tuple[Tensor, ...],
    batch: TokenBatch,
    filtered: Tensor | None = None,
) -> LossResult:
    of_rows = batch.rows.to_rows(logps), batch.rows.to_rows(entropy)
    return LossResult(loss, *of_rows, gradients, filtered)
