"""The passes behind the public functions: hidden, logits or logps in; loss, metrics and gradients out, without autograd.

Gradients are formed in the forward, for an upstream gradient of 1 (`ops.py` multiplies by what comes).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from grpo_fast.config import LossConfig
from grpo_fast.kernels.backends import Backend, resolve
from grpo_fast.kernels.linear import LinearHead, RowStats, Wanted
from grpo_fast.kernels.metrics import metric_names, token_metrics
from grpo_fast.kernels.tokens import TokenLoss, token_loss
from grpo_fast.logits import LogitsSweep
from grpo_fast.prepare import ActiveTokens, TokenInputs, active_tokens, check_logps

class LossResult(NamedTuple):
    """What every loss operator returns; empty tensors stand for what was not asked for."""

    loss: Tensor  # 0-d
    logps: Tensor  # (N,)
    entropy: Tensor  # (N,)
    gradients: tuple[Tensor, ...]


@contextlib.contextmanager
def kernel_precision(device: torch.device) -> Iterator[None]:
    """Autocast does not reach the kernels: they compute in the dtypes they are given."""
    if torch.is_autocast_enabled(device.type):
        with torch.autocast(device.type, enabled=False):
            yield
    else:
        yield


def pick_backend(name: str, x: Tensor) -> Backend:
    """fp64 is the reference's own dtype: "auto" means torch there."""
    if x.dtype == torch.float64:
        if name not in ("auto", "torch"):
            raise ValueError(f"backend: fp64 tensors expect 'auto' or 'torch', got {name!r}")
        return resolve("torch", x.device)
    return resolve(name, x.device)


def rows_result(result: TokenLoss, stats: RowStats, tokens: ActiveTokens, gradients: tuple) -> LossResult:
    _, logps, entropy = stats
    h = logps.new_empty(0) if entropy is None else tokens.to_rows(entropy)
    return LossResult(result.loss, tokens.to_rows(logps), h, gradients)


def linear_loss(
    hidden: Tensor,  # (N, H)
    weight: Tensor,  # (V, H)
    bias: Tensor | None,  # (V,)
    inputs: TokenInputs,
    config: LossConfig,
    backend: str,
    validate: str,
    wanted: Wanted,
) -> LossResult:
    """hidden → loss; gradients are (dH, dW, db)."""
    tokens = active_tokens(inputs, hidden.shape[0], weight.shape[0], config, validate)
    assert tokens.target_ids is not None
    head = LinearHead(
        hidden, weight, bias, tokens.target_ids, tokens.rule, tokens.index, pick_backend(backend, hidden)
    )
    entropy_wanted = config.needs_entropy
    empty = hidden.new_empty(0)

    if not any(wanted):
        stats = head.logps(return_entropy=entropy_wanted)
        check_logps(stats[1], validate)
        result = token_loss(stats[1], stats[2], tokens.batch, config)
        return rows_result(result, stats, tokens, (empty, empty.clone(), empty.clone()))

    known: RowStats | None = None
    if not config.is_token_local(inputs.sampling_logps is not None):
        known = head.logps(return_entropy=entropy_wanted)
        whole = token_loss(known[1], known[2], tokens.batch, config)

    def coefficients(logps: Tensor, entropy: Tensor | None, rows: slice) -> tuple[Tensor, Tensor | None]:
        nonlocal whole
        if known is not None:
            return whole.grad_logps[rows], None if whole.grad_entropy is None else whole.grad_entropy[rows]
        if head.is_single_chunk:
            whole = token_loss(logps, entropy, tokens.batch, config)
            return whole.grad_logps, whole.grad_entropy
        part = token_loss(logps, entropy, tokens.batch.rows(rows), config)
        return part.grad_logps, part.grad_entropy

    stats, sums = head.gradients(coefficients, wanted, return_entropy=entropy_wanted, known=known)
    check_logps(stats[1], validate)
    if known is None and (not head.is_single_chunk or head.num_rows == 0):
        whole = token_loss(stats[1], stats[2], tokens.batch, config)
    return rows_result(whole, stats, tokens, sums.finish(empty))


def logits_loss(
    logits: Tensor,  # (N, V)
    out: Tensor | None,  # (N, V), or None when no gradient is wanted
    inputs: TokenInputs,
    config: LossConfig,
    backend: str,
    validate: str,
) -> LossResult:
    """logits → loss; d-logits are written to `out`, which may be `logits` itself."""
    tokens = active_tokens(inputs, logits.shape[0], logits.shape[1], config, validate)
    kernels = pick_backend(backend, logits)
    sweep = LogitsSweep(logits, out, tokens, config, kernels)
    one_pass = out is not None and config.is_token_local(inputs.sampling_logps is not None)
    stats = sweep.one_pass() if one_pass else sweep.logps()
    check_logps(stats[1], validate)
    result = token_loss(stats[1], stats[2], tokens.batch, config)
    if out is not None and not one_pass:
        sweep.gradient(result, stats)
    return rows_result(result, stats, tokens, ())


def logps_loss(
    logps: Tensor,  # (N,)
    entropy: Tensor | None,  # (N,)
    inputs: TokenInputs,
    config: LossConfig,
) -> LossResult:
    """logps → loss; gradients are (dL/dlogp, dL/dentropy)."""
    tokens = active_tokens(inputs, logps.shape[0], None, config, "auto")
    lp, h = tokens.active(logps), None if entropy is None else tokens.active(entropy)
    result = token_loss(lp, h, tokens.batch, config)
    d_entropy = logps.new_empty(0) if result.grad_entropy is None else tokens.to_rows(result.grad_entropy)
    gradients = (tokens.to_rows(result.grad_logps), d_entropy)
    return rows_result(result, (lp, lp, h), tokens, gradients)


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
    return torch.stack([metrics[name] for name in metric_names(config, inputs.sampling_logps is not None, h is not None)])
