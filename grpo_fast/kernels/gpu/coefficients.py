"""Losses and coefficients dL/dlogps of a token-level loss, in one launch where torch takes twenty.

The leaves of objective/losses.py and objective/kl.py, compiled; 24 to 36 bytes per row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from grpo_fast.kernels.gpu.math import exp_fp32
from grpo_fast.kernels.gpu.rows import RATIO_MAX, device_function, launch, loss_and_slope, vector
from grpo_fast.kernels.workspace import unset
from grpo_fast.objective.coefficients import RowTerms
from grpo_fast.objective.config import LossConfig
from grpo_fast.objective.kl import KL_ESTIMATORS
from grpo_fast.objective.losses import OBJECTIVES

BLOCK_T = 128


@triton.jit(do_not_specialize=["n_rows"])
def coefficients_kernel(
    logps_ptr, advantages_ptr, policy_weights_ptr, kl_weights_ptr, old_logps_ptr, ref_logps_ptr,
    losses_ptr, grad_logps_ptr, n_rows, p0, p1, p2, p3, kl_most, kl_reach,
    OBJECTIVE: tl.constexpr, N_PARAMS: tl.constexpr, KL: tl.constexpr,
    KL_TIMES_RATIO: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    in_rows = rows < n_rows
    lp = tl.load(logps_ptr + rows, mask=in_rows, other=0.0)
    lr = tl.zeros([BLOCK_T], tl.float32)
    if old_logps_ptr is not None:
        lr = lp - tl.load(old_logps_ptr + rows, mask=in_rows, other=0.0)
        lr = tl.where(lr > RATIO_MAX, RATIO_MAX, lr)
    weight = tl.load(policy_weights_ptr + rows, mask=in_rows, other=0.0)
    advantage = tl.load(advantages_ptr + rows, mask=in_rows, other=0.0)
    loss, slope = loss_and_slope(lp, lr, advantage, p0, p1, p2, p3, OBJECTIVE, N_PARAMS)
    loss = tl.where(weight == 0.0, 0.0, weight * loss)
    g = tl.where(weight == 0.0, 0.0, weight * slope)
    if kl_weights_ptr is not None:
        kl_weight = tl.load(kl_weights_ptr + rows, mask=in_rows, other=0.0)
        d = tl.load(ref_logps_ptr + rows, mask=in_rows, other=0.0) - lp
        kl, kl_slope = KL(d, kl_most, kl_reach)
        if KL_TIMES_RATIO:
            ratio = exp_fp32(lr)
            kl_slope = (kl_slope + kl) * ratio
            kl *= ratio
        loss += tl.where(kl_weight == 0.0, 0.0, kl_weight * kl)
        g += tl.where(kl_weight == 0.0, 0.0, kl_weight * kl_slope)
    # Comparisons inside the leaf and a weight of 0 would hide a NaN.
    tl.store(losses_ptr + rows, tl.where(lp != lp, lp, loss), mask=in_rows)
    tl.store(grad_logps_ptr + rows, tl.where(lp != lp, lp, g), mask=in_rows)


def row_coefficients(
    logps: Tensor,  # (C,) fp32
    terms: RowTerms,
    config: LossConfig,
) -> tuple[Tensor, Tensor]:
    """(losses, grad_logps), (C,) each; the same door as objective/coefficients.py."""
    losses, grad_logps = (unset(torch.empty_like, logps) for _ in range(2))
    advantages, weights, kl_weights, old_logps, ref_logps, _ = (vector(x) for x in terms)
    has_kl = kl_weights is not None and ref_logps is not None
    if logps.shape[0]:
        launch(
            coefficients_kernel, triton.cdiv(logps.shape[0], BLOCK_T), logps, advantages, weights,
            kl_weights if has_kl else None, old_logps, ref_logps if has_kl else None, losses,
            grad_logps, logps.shape[0], *config.params, *[0.0] * (4 - len(config.params)),
            *config.kl_limits,
            OBJECTIVE=device_function(OBJECTIVES[config.loss_type].leaf),
            N_PARAMS=len(config.params), KL=device_function(KL_ESTIMATORS[config.kl_estimator]),
            KL_TIMES_RATIO=bool(config.kl_times_ratio), BLOCK_T=BLOCK_T, num_warps=4,
        )  # fmt: skip
    return losses, grad_logps
