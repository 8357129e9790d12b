"""Triton kernel that computes the loss of each token and its derivative dL/dlogp.

    losses[t] = policy_weights[t]·ℓ + kl_weights[t]·KL,  grad_logps[t] = d losses[t] / d logp[t]

The kernel contains the functions of objective/losses.py and objective/kl.py, which Triton compiles
from their Python source. `row_coefficients` launches it once instead of about twenty torch
operations, and causes 24 to 36 bytes of HBM traffic per row. The loss kernel in rows.py calls
`loss_and_slope` between its two passes over a row. If exponentials are stored, the kernel in
linear.py that adds the sums of the slices calls it, so that no further launch is needed.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from grpo_fast.kernels.gpu.launch import ceil_div, launch
from grpo_fast.kernels.gpu.math import exp_fp32, expm1, expm1_minus, log1p
from grpo_fast.kernels.types import vector
from grpo_fast.objective.coefficients import RowTerms
from grpo_fast.objective.config import LossConfig
from grpo_fast.objective.kl import KL_ESTIMATORS
from grpo_fast.objective.losses import LOG_RATIO_MAX, OBJECTIVES, TokenFunction, bind

BLOCK_T = 128
RATIO_MAX = tl.constexpr(LOG_RATIO_MAX)
MAX_PARAMS = 4


@triton.jit
def loss_and_slope(
    lp, at, mask, advantages_ptr, policy_weights_ptr, kl_weights_ptr, old_logps_ptr, ref_logps_ptr,
    p0, p1, p2, p3, kl_max, kl_d_max, OBJECTIVE: tl.constexpr, N_PARAMS: tl.constexpr,
    KL: tl.constexpr, KL_TIMES_RATIO: tl.constexpr,
):  # fmt: skip
    """Return policy_weight·ℓ + kl_weight·KL and its derivative with respect to the logp.

    ℓ is the policy loss of a token, whose logp is `lp`. `at` is the index of its row. `lp` and `at`
    may also be blocks of several rows. The loss function gets the first N_PARAMS of p0 to p3.
    """
    lr = tl.zeros_like(lp)
    if old_logps_ptr is not None:
        lr = lp - tl.load(old_logps_ptr + at, mask=mask, other=0.0)
        # Limit the log ratio, so that the ratio exp(lr) is finite.
        lr = tl.where(lr > RATIO_MAX, RATIO_MAX, lr)
    weight = tl.load(policy_weights_ptr + at, mask=mask, other=0.0)
    advantage = tl.load(advantages_ptr + at, mask=mask, other=0.0)
    tl.static_assert(N_PARAMS <= 4)  # MAX_PARAMS
    params = (p0, p1, p2, p3)
    loss, slope = OBJECTIVE(lp, lr, advantage, *params[:N_PARAMS])
    # Set the loss to 0 in rows with weight 0. The product would keep a NaN, because 0·NaN is NaN.
    loss = tl.where(weight == 0.0, 0.0, weight * loss)
    g = tl.where(weight == 0.0, 0.0, weight * slope)
    if kl_weights_ptr is not None:
        kl_weight = tl.load(kl_weights_ptr + at, mask=mask, other=0.0)
        d = tl.load(ref_logps_ptr + at, mask=mask, other=0.0) - lp
        kl, kl_slope = KL(d, kl_max, kl_d_max)
        if KL_TIMES_RATIO:
            ratio = exp_fp32(lr)
            # Apply the product rule, d(KL·ratio) = (KL' + KL)·ratio.
            kl_slope = (kl_slope + kl) * ratio
            kl *= ratio
        loss += tl.where(kl_weight == 0.0, 0.0, kl_weight * kl)
        g += tl.where(kl_weight == 0.0, 0.0, kl_weight * kl_slope)
    # If the logp is NaN, return NaN. A comparison in the loss function or a weight of 0 could have
    # turned the NaN into a number.
    return tl.where(lp != lp, lp, loss), tl.where(lp != lp, lp, g)


@functools.cache
def device_function(function: TokenFunction) -> TokenFunction:
    """Compile a function of grpo_fast.objective for Triton, with `tl` bound to triton.language."""
    words = {"expm1": expm1, "expm1_minus": expm1_minus, "log1p": log1p}
    return bind(function, tl, triton.jit, words)


def loss_arguments(config: LossConfig) -> tuple[tuple[float, ...], dict[str, object]]:
    """Return the arguments that describe a loss to the Triton kernels.

    Returns:
        The numeric arguments p0 … p3, kl_max and kl_d_max, and a dict of compile-time arguments.
    """
    params = config.params
    return (*params, *[0.0] * (MAX_PARAMS - len(params)), *config.kl_limits), {
        "OBJECTIVE": device_function(OBJECTIVES[config.loss_type].function),
        "N_PARAMS": len(params),
        "KL": device_function(KL_ESTIMATORS[config.kl_estimator]),
        "KL_TIMES_RATIO": bool(config.kl_times_ratio),
    }


@triton.jit(do_not_specialize=["n_rows"])
def coefficients_kernel(
    logps_ptr, advantages_ptr, policy_weights_ptr, kl_weights_ptr, old_logps_ptr, ref_logps_ptr,
    losses_ptr, grad_logps_ptr, n_rows, p0, p1, p2, p3, kl_max, kl_d_max,
    OBJECTIVE: tl.constexpr, N_PARAMS: tl.constexpr, KL: tl.constexpr,
    KL_TIMES_RATIO: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Compute the losses of BLOCK_T tokens and their derivatives dL/dlogp."""
    rows = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    in_rows = rows < n_rows
    lp = tl.load(logps_ptr + rows, mask=in_rows, other=0.0)
    loss, g = loss_and_slope(
        lp, rows, in_rows, advantages_ptr, policy_weights_ptr, kl_weights_ptr, old_logps_ptr,
        ref_logps_ptr, p0, p1, p2, p3, kl_max, kl_d_max, OBJECTIVE, N_PARAMS, KL, KL_TIMES_RATIO,
    )  # fmt: skip
    tl.store(losses_ptr + rows, loss, mask=in_rows)
    tl.store(grad_logps_ptr + rows, g, mask=in_rows)


def row_coefficients(
    logps: Tensor, terms: RowTerms, config: LossConfig
) -> tuple[Tensor, Tensor]:  # (C,) fp32 each
    """Compute losses and their logp gradients, like `objective.coefficients.row_coefficients`."""
    losses, grad_logps = (torch.empty_like(logps) for _ in range(2))
    numbers, constants = loss_arguments(config)
    launch(
        coefficients_kernel, ceil_div(logps.shape[0], BLOCK_T), logps,
        *(vector(x) for x in terms[:5]), losses, grad_logps, logps.shape[0], *numbers,
        BLOCK_T=BLOCK_T, num_warps=4, **constants,
    )  # fmt: skip
    return losses, grad_logps
