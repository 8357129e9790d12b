"""Row kernels in Triton: one program owns one row of logits, whatever its length.

    row_logps    logits -> lse, logps, entropy            HBM: one read of (C, V)
    row_grad_    logits, dL/dlogps -> d-logits            HBM: one read, one write
    row_loss_    both, and the loss's slope between them  HBM: one read, one write (the second read
                                                          is the row that was just left in L2)

With z = softcap·tanh(logit_scale·raw/softcap)/temperature, p = softmax(z), lp = log p[target],
H = -Σ p·log p:

    d z_j   = g·(1[j = target] - p_j) - g_H·p_j·(log p_j + H),     g = dL/dlp, g_H = dL/dH
    d raw_j = d z_j · (1 - tanh²) · logit_scale / temperature

Sums are fp32 and online: a running maximum per row, running sums per lane, reduced across lanes
once, in a fixed order. A row's numbers depend on that row alone. Lengths, strides and
hyperparameters are run-time arguments. `enable_fp_fusion=False` everywhere: whether a multiply and
an add are fused would depend on what surrounds them, and the same row would get different last bits
from two kernels that share this source.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from grpo_fast.kernels.gpu.configs import row_config
from grpo_fast.kernels.gpu.math import (
    FLOOR,
    exp_fp32,
    expm1,
    expm1_minus,
    finish,
    inverse_temperature,
    log1p,
    scores,
)
from grpo_fast.kernels.types import LogitRule, RowLoss, RowStats
from grpo_fast.kernels.workspace import unset
from grpo_fast.objective.coefficients import RowTerms
from grpo_fast.objective.config import LossConfig
from grpo_fast.objective.kl import KL_ESTIMATORS
from grpo_fast.objective.losses import LOG_RATIO_MAX, OBJECTIVES, bind

RATIO_MAX = tl.constexpr(LOG_RATIO_MAX)


@triton.jit
def statistics(
    row_ptr,
    target,
    V,
    logit_scale,
    softcap,
    inv_temperature,
    ENTROPY: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """First loop over the row -> lse, lp, entropy."""
    offs_v = tl.arange(0, BLOCK_V)
    # Read before the second loop may overwrite the row; the barriers of the reductions below keep
    # it there.
    inside = (target >= 0) & (target < V)
    raw_target = tl.load(row_ptr + target, mask=inside, other=0.0).to(tl.float32)
    z_target, target_slope = scores(raw_target, logit_scale, softcap, inv_temperature)
    high = tl.maximum(tl.where(inside, z_target, FLOOR), FLOOR)
    rest = tl.zeros([BLOCK_V], tl.float32)
    moment = tl.zeros([BLOCK_V], tl.float32)
    for start in range(0, V, BLOCK_V):
        cols = start + offs_v
        raw = tl.load(row_ptr + cols, mask=cols < V, other=0.0, eviction_policy="evict_last").to(
            tl.float32
        )
        z, _ = scores(raw, logit_scale, softcap, inv_temperature)
        z = tl.where((cols < V) & (cols != target), z, float("-inf"))
        raised = tl.maximum(high, tl.max(z, 0))
        shrink = exp_fp32(high - raised)
        below = z - raised
        e = exp_fp32(below)
        if ENTROPY:
            # Σ e·(z - max), not Σ e·z: the entropy is then no difference of two numbers of the size
            # of the logits.
            moment = (moment + (high - raised) * rest) * shrink + tl.where(e > 0, e * below, 0.0)
        rest = rest * shrink + e
        high = raised
    return finish(high, tl.sum(rest, 0), tl.sum(moment, 0), z_target, inside)


@triton.jit
def write_gradient(
    row_ptr, out_ptr, target, lse, lp, entropy, g, g_entropy, V, logit_scale, softcap,
    inv_temperature, ENTROPY: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Second loop over the row: d raw-logits; zeros, without a look, where nothing flows."""
    offs_v = tl.arange(0, BLOCK_V)
    if (g == 0.0) & (g_entropy == 0.0):
        for start in range(0, V, BLOCK_V):
            cols = start + offs_v
            tl.store(out_ptr + cols, tl.zeros([BLOCK_V], out_ptr.dtype.element_ty), mask=cols < V)
    else:
        g_target = -g * expm1(lp)
        for start in range(0, V, BLOCK_V):
            cols = start + offs_v
            raw = tl.load(
                row_ptr + cols, mask=cols < V, other=0.0, eviction_policy="evict_first"
            ).to(tl.float32)
            z, slope = scores(raw, logit_scale, softcap, inv_temperature)
            logp = z - lse
            p = exp_fp32(logp)
            # The target column stays out of the sum g·(1 - p): nothing cancels when p is close to
            # 1.
            d = tl.where(cols == target, g_target, -g * p)
            if ENTROPY:
                d -= tl.where(p > 0, g_entropy * p * (logp + entropy), 0.0)
            tl.store(out_ptr + cols, (d * slope).to(out_ptr.dtype.element_ty), mask=cols < V)


@triton.jit
def row_logps_kernel(
    logits_ptr, target_ptr, temperature_ptr, lse_ptr, logps_ptr, entropy_ptr,
    V, stride_logits_t, logit_scale, softcap, temperature,
    BLOCK_V: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    lse, lp, entropy = statistics(
        logits_ptr + row * stride_logits_t, tl.load(target_ptr + row), V, logit_scale, softcap,
        inverse_temperature(temperature_ptr, temperature, row), entropy_ptr is not None, BLOCK_V,
    )  # fmt: skip
    tl.store(lse_ptr + row, lse)
    tl.store(logps_ptr + row, lp)
    if entropy_ptr is not None:
        tl.store(entropy_ptr + row, entropy)


@triton.jit
def row_grad_kernel(
    logits_ptr, out_ptr, target_ptr, temperature_ptr, lse_ptr, logps_ptr, entropy_ptr,
    grad_logps_ptr, grad_entropy_ptr, V, stride_logits_t, stride_out_t, logit_scale, softcap,
    temperature, BLOCK_V: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    lse = tl.load(lse_ptr + row)
    entropy = lse
    g_entropy = tl.zeros([], tl.float32)
    if grad_entropy_ptr is not None:
        entropy = tl.load(entropy_ptr + row)
        g_entropy = tl.load(grad_entropy_ptr + row)
    write_gradient(
        logits_ptr + row * stride_logits_t, out_ptr + row * stride_out_t, tl.load(target_ptr + row),
        lse, tl.load(logps_ptr + row), entropy, tl.load(grad_logps_ptr + row), g_entropy, V,
        logit_scale, softcap, inverse_temperature(temperature_ptr, temperature, row),
        grad_entropy_ptr is not None, BLOCK_V,
    )  # fmt: skip


@triton.jit
def loss_and_slope(
    lp, lr, advantage, p0, p1, p2, p3, OBJECTIVE: tl.constexpr, N_PARAMS: tl.constexpr
):
    """The leaf's loss and d loss / d lp, called with as many hyperparameters as it has."""
    tl.static_assert(N_PARAMS <= 4)
    if N_PARAMS == 0:
        loss, slope = OBJECTIVE(lp, lr, advantage)
    elif N_PARAMS == 1:
        loss, slope = OBJECTIVE(lp, lr, advantage, p0)
    elif N_PARAMS == 2:
        loss, slope = OBJECTIVE(lp, lr, advantage, p0, p1)
    elif N_PARAMS == 3:
        loss, slope = OBJECTIVE(lp, lr, advantage, p0, p1, p2)
    else:
        loss, slope = OBJECTIVE(lp, lr, advantage, p0, p1, p2, p3)
    return loss, slope


@triton.jit
def row_loss_kernel(
    logits_ptr, out_ptr, target_ptr, temperature_ptr, advantages_ptr, policy_weights_ptr,
    kl_weights_ptr, old_logps_ptr, ref_logps_ptr, grad_entropy_ptr, lse_ptr, logps_ptr, entropy_ptr,
    losses_ptr, grad_logps_ptr, V, stride_logits_t, stride_out_t, logit_scale, softcap, temperature,
    p0, p1, p2, p3, kl_most, kl_reach, OBJECTIVE: tl.constexpr, N_PARAMS: tl.constexpr,
    KL: tl.constexpr, KL_TIMES_RATIO: tl.constexpr, ENTROPY: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * stride_logits_t
    target = tl.load(target_ptr + row)
    inv_temperature = inverse_temperature(temperature_ptr, temperature, row)
    lse, lp, entropy = statistics(
        row_ptr, target, V, logit_scale, softcap, inv_temperature, ENTROPY, BLOCK_V
    )
    tl.store(lse_ptr + row, lse)
    tl.store(logps_ptr + row, lp)
    if entropy_ptr is not None:
        tl.store(entropy_ptr + row, entropy)

    lr = tl.zeros([], tl.float32)
    if old_logps_ptr is not None:
        lr = lp - tl.load(old_logps_ptr + row)
        lr = tl.where(lr > RATIO_MAX, RATIO_MAX, lr)
    weight = tl.load(policy_weights_ptr + row)
    advantage = tl.load(advantages_ptr + row)
    loss, slope = loss_and_slope(lp, lr, advantage, p0, p1, p2, p3, OBJECTIVE, N_PARAMS)
    loss = tl.where(weight == 0.0, 0.0, weight * loss)
    g = tl.where(weight == 0.0, 0.0, weight * slope)
    if kl_weights_ptr is not None:
        kl_weight = tl.load(kl_weights_ptr + row)
        kl, kl_slope = KL(tl.load(ref_logps_ptr + row) - lp, kl_most, kl_reach)
        if KL_TIMES_RATIO:
            ratio = exp_fp32(lr)
            kl_slope = (kl_slope + kl) * ratio
            kl *= ratio
        loss += tl.where(kl_weight == 0.0, 0.0, kl_weight * kl)
        g += tl.where(kl_weight == 0.0, 0.0, kl_weight * kl_slope)
    # Comparisons inside the leaf and a weight of 0 would hide a NaN; what does not count may hold
    # one anywhere.
    counts = (target >= 0) & (target < V)
    nothing = lp - lp
    loss = tl.where(counts, loss + nothing, 0.0)
    g = tl.where(counts, g + nothing, 0.0)
    tl.store(losses_ptr + row, loss)
    tl.store(grad_logps_ptr + row, g)
    g_entropy = tl.zeros([], tl.float32)
    if grad_entropy_ptr is not None:
        g_entropy = tl.load(grad_entropy_ptr + row, mask=counts, other=0.0)
    write_gradient(
        row_ptr, out_ptr + row * stride_out_t, target, lse, lp, entropy, g, g_entropy, V,
        logit_scale, softcap, inv_temperature, grad_entropy_ptr is not None, BLOCK_V,
    )  # fmt: skip


def launch(kernel: Any, programs: int, *args: Any, **options: Any) -> None:
    """Start `programs` programs of `kernel` on the device of its first tensor (tests patch it)."""
    tensor = next(arg for arg in args if isinstance(arg, Tensor))
    with torch.cuda.device_of(tensor):
        kernel[(programs,)](*args, enable_fp_fusion=False, **options)


def rule_arguments(rule: LogitRule) -> tuple[Tensor | None, float, float | None, float]:
    """`temperature_ptr, logit_scale, softcap, temperature` of a kernel."""
    softcap = None if rule.softcap is None else float(rule.softcap)
    if isinstance(rule.temperature, Tensor):
        return vector(rule.temperature), float(rule.logit_scale), softcap, 1.0
    return None, float(rule.logit_scale), softcap, float(rule.temperature)


def vector(values: Tensor | None) -> Tensor | None:
    """Per-row values as the kernels read them: fp32, unit stride."""
    return None if values is None else values.detach().to(torch.float32).contiguous()


def outputs(logits: Tensor, return_entropy: bool) -> RowStats:
    rows = logits.shape[0]
    lse, logps = (
        unset(torch.empty, rows, dtype=torch.float32, device=logits.device) for _ in range(2)
    )
    return lse, logps, unset(torch.empty_like, lse) if return_entropy else None


def row_logps(
    logits: Tensor,  # (C, V)
    target_ids: Tensor,  # (C,)
    rule: LogitRule,
    *,
    return_entropy: bool,
) -> RowStats:
    """lse, log-probability of the target and (when asked for) entropy of every row, each (C,) fp32.

    The same door as `reference.row_logps`. `logits` is fp32, bf16 or fp16 with a contiguous last
    dimension and any row stride. A target id outside [0, V) is never read; its row gets the
    log-probability of a raw logit of 0.
    """
    lse, logps, entropy = outputs(logits, return_entropy)
    if logits.shape[0]:
        temperature_ptr, *scalars = rule_arguments(rule)
        block_v, num_warps = row_config(logits.shape[1])
        launch(
            row_logps_kernel, logits.shape[0], logits, target_ids.contiguous(), temperature_ptr,
            lse, logps, entropy, logits.shape[1], logits.stride(0), *scalars, BLOCK_V=block_v,
            num_warps=num_warps,
        )  # fmt: skip
    return lse, logps, entropy


def row_grad_(
    logits: Tensor,  # (C, V)
    target_ids: Tensor,  # (C,)
    stats: RowStats,
    grad_logps: Tensor,  # (C,)
    grad_entropy: Tensor | None,  # (C,)
    rule: LogitRule,
    *,
    out: Tensor | None = None,  # (C, V)
) -> Tensor:
    """d raw-logits, written to `out` (default: over `logits`) and returned; the same door as
    `reference.row_grad_`.

    `out` is `logits` itself or memory that does not overlap it. A row with nothing flowing into it
    becomes exact zeros.
    """
    out = logits if out is None else out
    if logits.shape[0]:
        lse, logps, entropy = (vector(x) for x in stats)
        temperature_ptr, *scalars = rule_arguments(rule)
        block_v, num_warps = row_config(logits.shape[1])
        launch(
            row_grad_kernel, logits.shape[0], logits, out, target_ids.contiguous(), temperature_ptr,
            lse, logps, None if grad_entropy is None else entropy, vector(grad_logps),
            vector(grad_entropy), logits.shape[1], logits.stride(0), out.stride(0), *scalars,
            BLOCK_V=block_v, num_warps=num_warps,
        )  # fmt: skip
    return out


@functools.cache
def device_function(leaf: Callable) -> Any:
    """A leaf of objective/ as a Triton function: the same source, with `tl` bound to Triton."""
    words = {"expm1": expm1, "expm1_minus": expm1_minus, "log1p": log1p}
    return bind(leaf, tl, triton.jit, words)


def row_loss_(
    logits: Tensor,  # (C, V)
    out: Tensor,  # (C, V)
    target_ids: Tensor,  # (C,)
    terms: RowTerms,
    config: LossConfig,
    rule: LogitRule,
    *,
    return_entropy: bool,
) -> RowLoss:
    """One kernel from logits to the gradient of a token-level loss; the same door as
    `reference.row_loss_`.

    lse, logps and entropy are those of `row_logps`, bit for bit.
    """
    lse, logps, entropy = outputs(logits, return_entropy)
    losses, grad_logps = unset(torch.empty_like, lse), unset(torch.empty_like, lse)
    if not logits.shape[0]:
        return RowLoss(lse, logps, entropy, losses, grad_logps)
    advantages, weights, kl_weights, old_logps, ref_logps, grad_entropy = (vector(x) for x in terms)
    has_kl = kl_weights is not None and ref_logps is not None
    temperature_ptr, *scalars = rule_arguments(rule)
    block_v, num_warps = row_config(logits.shape[1])
    launch(
        row_loss_kernel, logits.shape[0], logits, out, target_ids.contiguous(), temperature_ptr,
        advantages, weights, kl_weights if has_kl else None, old_logps,
        ref_logps if has_kl else None, grad_entropy, lse, logps, entropy, losses, grad_logps,
        logits.shape[1], logits.stride(0), out.stride(0), *scalars, *config.params,
        *[0.0] * (4 - len(config.params)), *config.kl_limits,
        OBJECTIVE=device_function(OBJECTIVES[config.loss_type].leaf), N_PARAMS=len(config.params),
        KL=device_function(KL_ESTIMATORS[config.kl_estimator]),
        KL_TIMES_RATIO=bool(config.kl_times_ratio),
        ENTROPY=return_entropy or grad_entropy is not None, BLOCK_V=block_v, num_warps=num_warps,
    )  # fmt: skip
    return RowLoss(lse, logps, entropy, losses, grad_logps)
