"""The passes behind the public functions: hidden, logits or logps in; loss and gradients out, no autograd.

Gradients are formed in the forward, for an upstream gradient of 1 (`ops.py` multiplies by what comes).
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from grpo_fast.config import LossConfig
from grpo_fast.kernels.backends import Backend, resolve
from grpo_fast.kernels.capture import refuse
from grpo_fast.kernels.half_range import narrowed, needs_range
from grpo_fast.kernels.linear import LinearHead, RowStats, Wanted
from grpo_fast.kernels.metrics import metric_names, token_metrics
from grpo_fast.kernels.rows_torch import RowLoss
from grpo_fast.kernels.tokens import fused_inputs, token_loss
from grpo_fast.logits import LogitsSweep
from grpo_fast.prepare import (
    ActiveTokens,
    TokenInputs,
    active_tokens,
    check_least_logp,
    check_logps,
    checked_rows,
)

UNCHANGED = nullcontext()


class LossResult(NamedTuple):
    """What every loss operator returns; empty tensors stand for what was not asked for."""

    loss: Tensor  # 0-d
    logps: Tensor  # (N,)
    entropy: Tensor  # (N,)
    gradients: tuple[Tensor, ...]
    filtered: Tensor | None = None  # (2,) what grad_filter left out (kernels/grad_filter.py)
    units: Tensor | None = None  # (K,) fp32: what each gradient is to be multiplied by (kernels/half_range.py)


def kernel_precision(device: torch.device) -> AbstractContextManager[Any]:
    """Autocast does not reach the kernels: they compute in the dtypes they are given."""
    if torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return UNCHANGED


def pick_backend(name: str, x: Tensor) -> Backend:
    """fp64 is the reference's own dtype: "auto" means torch there."""
    if x.dtype == torch.float64:
        if name not in ("auto", "torch"):
            raise ValueError(f"backend: fp64 tensors expect 'auto' or 'torch', got {name!r}")
        return resolve("torch", x.device)
    return resolve(name, x.device)


def rows_result(loss: Tensor, stats: RowStats, tokens: ActiveTokens, gradients: tuple) -> LossResult:
    _, logps, entropy = stats
    h = logps.new_empty(0) if entropy is None else tokens.to_rows(entropy)
    return LossResult(loss, tokens.to_rows(logps), h, gradients)


def linear_loss(
    hidden: Tensor,  # (N, H)
    weight: Tensor,  # (V, H)
    bias: Tensor | None,  # (V,)
    hidden_rows: Tensor | None,  # (T,) int64: the row of hidden that predicts target t; None: row t (then N = T)
    inputs: TokenInputs,
    config: LossConfig,
    backend: str,
    validate: str,
    wanted: Wanted,
    grad_filter: float | None,
) -> LossResult:
    """hidden → loss; gradients are (dH, dW, db)."""
    assert inputs.target_ids is not None
    refuse("grad_filter", hidden, grad_filter)
    refuse("validate", hidden, validate, "auto")
    tokens = active_tokens(inputs, inputs.target_ids.shape[0], weight.shape[0], config, validate)
    assert tokens.target_ids is not None
    index, rows_repeat = tokens.rows, hidden_rows is not None
    if hidden_rows is not None:
        index = checked_rows(tokens.active(hidden_rows), hidden.shape[0], validate)
    head = LinearHead(
        hidden, weight, bias, tokens.target_ids, tokens.rule, index, pick_backend(backend, hidden),
        rows_repeat=rows_repeat, grad_filter=grad_filter, entropy_gradient=config.entropy_coef != 0,
        wide_gradients=needs_range(hidden.dtype),
    )  # fmt: skip
    if any(wanted) and needs_range(hidden.dtype):
        tokens = tokens.in_range()
    result = _head_loss(head, tokens, config, validate, wanted)
    if tokens.batch.unit is not None:
        result = _in_16_bits(result, tokens.batch.unit, hidden.dtype)
    return result if head.filtered is None else result._replace(filtered=head.filtered.shares())


def _in_16_bits(result: LossResult, unit: Tensor, dtype: torch.dtype) -> LossResult:
    """The result of a batch in range: the loss as it is, gradients of `dtype` beside their units."""
    kept = [narrowed(x, dtype) if x.numel() else (x, unit) for x in result.gradients]
    units = torch.stack([x / unit for _, x in kept])
    return result._replace(loss=result.loss / unit, gradients=tuple(x for x, _ in kept), units=units)


def _head_loss(head: LinearHead, tokens: ActiveTokens, config: LossConfig, validate: str, wanted: Wanted) -> LossResult:
    fused = fused_inputs(tokens.batch, config)
    if any(wanted) and fused is not None and head.num_rows:
        rows, gradients = head.loss_gradients(fused, config, wanted)
        return rows_result(summed(rows, fused.grad_entropy, validate), rows[:3], tokens, gradients)
    stats = head.logps(return_entropy=config.needs_entropy, keep=any(wanted))
    check_logps(stats[1], validate)
    result = token_loss(stats[1], stats[2], tokens.batch, config)
    gradients = head.gradients(result.grad_logps, result.grad_entropy, stats, wanted)
    return rows_result(result.loss, stats, tokens, gradients)


def summed(rows: RowLoss, grad_entropy: Tensor | None, validate: str) -> Tensor:
    """0-d fp32: the loss of all rows, summed in fp64; refuses a logp of -inf."""
    if rows.sums is not None:
        check_least_logp(rows.sums.least_logp)
        return rows.logps.new_full((), rows.sums.loss)
    check_logps(rows.logps, validate)
    loss = rows.losses.sum(dtype=torch.float64)
    if grad_entropy is not None and rows.entropy is not None:
        loss = loss + (grad_entropy * rows.entropy).sum(dtype=torch.float64)
    return loss.float()


def logits_loss(
    logits: Tensor,  # (N, V)
    out: Tensor | None,  # (N, V), or None when no gradient is wanted
    inputs: TokenInputs,
    config: LossConfig,
    backend: str,
    validate: str,
) -> LossResult:
    """logits → loss; d-logits are written to `out`, which may be `logits` itself."""
    refuse("validate", logits, validate, "auto")
    tokens = active_tokens(inputs, logits.shape[0], logits.shape[1], config, validate)
    unit = None
    if out is not None and needs_range(out.dtype):
        tokens = tokens.in_range()
        unit = tokens.batch.unit
    result = _logits_loss(logits, out, tokens, config, backend, validate)
    return result if unit is None else result._replace(loss=result.loss / unit, units=1 / unit[None])


def _logits_loss(
    logits: Tensor, out: Tensor | None, tokens: ActiveTokens, config: LossConfig, backend: str, validate: str
) -> LossResult:
    sweep = LogitsSweep(logits, out, tokens, config, pick_backend(backend, logits))
    gradients = (logits.new_empty(0) if out is None else out,)
    fused = fused_inputs(tokens.batch, config)
    if out is not None and fused is not None and logits.shape[0]:
        rows = sweep.one_pass(fused)
        return rows_result(summed(rows, fused.grad_entropy, validate), rows[:3], tokens, gradients)
    stats = sweep.logps()
    check_logps(stats[1], validate)
    result = token_loss(stats[1], stats[2], tokens.batch, config)
    if out is not None:
        sweep.gradient(result, stats)
    return rows_result(result.loss, stats, tokens, gradients)


def logps_loss(
    logps: Tensor,  # (N,)
    entropy: Tensor | None,  # (N,)
    inputs: TokenInputs,
    config: LossConfig,
) -> LossResult:
    """logps → loss; gradients are (dL/dlogp, dL/dentropy)."""
    tokens = active_tokens(inputs, logps.shape[0], None, config, "auto")
    lp, h = tokens.active(logps), None if entropy is None else tokens.active(entropy)
    check_logps(lp, "auto", "logps: expected finite numbers at the active tokens, got -inf")
    result = token_loss(lp, h, tokens.batch, config)
    d_entropy = logps.new_empty(0) if result.grad_entropy is None else tokens.to_rows(result.grad_entropy)
    gradients = (tokens.to_rows(result.grad_logps), d_entropy)
    own = (lp, lp.clone(), None if h is None else h.clone())  # an output never shares memory with an input
    return rows_result(result.loss, own, tokens, gradients)


def logps_metrics(
    logps: Tensor,  # (N,)
    entropy: Tensor | None,  # (N,)
    inputs: TokenInputs,
    config: LossConfig,
) -> Tensor:
    """(K,) the metrics of a call with these logps, in the order of `metric_names`."""
    tokens = active_tokens(inputs._replace(target_ids=None), logps.shape[0], None, config, "auto")
    lp, h = tokens.active(logps), None if entropy is None else tokens.active(entropy)
    metrics = token_metrics(lp, h, tokens.batch, config, tokens.num_rows)
    return torch.stack(
        [metrics[name] for name in metric_names(config, inputs.sampling_logps is not None, h is not None)]
    )
