"""Losses and coefficients dL/dlogps of a token-level loss, in one launch where torch takes twenty.

The leaves of objective/losses.py and objective/kl.py, compiled; 24 to 36 bytes per row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from grpo_fast.kernels.gpu.launch import launch, vector
from grpo_fast.kernels.gpu.leaves import leaf_arguments, loss_and_slope
from grpo_fast.objective.coefficients import RowTerms
from grpo_fast.objective.config import LossConfig

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
    loss, g = loss_and_slope(
        lp, rows, in_rows, advantages_ptr, policy_weights_ptr, kl_weights_ptr, old_logps_ptr,
        ref_logps_ptr, p0, p1, p2, p3, kl_most, kl_reach, OBJECTIVE, N_PARAMS, KL, KL_TIMES_RATIO,
    )  # fmt: skip
    tl.store(losses_ptr + rows, loss, mask=in_rows)
    tl.store(grad_logps_ptr + rows, g, mask=in_rows)


def row_coefficients(
    logps: Tensor,  # (C,) fp32
    terms: RowTerms,
    config: LossConfig,
) -> tuple[Tensor, Tensor]:
    """(losses, grad_logps), (C,) each; the same door as objective/coefficients.py."""
    losses, grad_logps = (torch.empty_like(logps) for _ in range(2))
    numbers, leaves = leaf_arguments(config)
    if len(logps):
        launch(
            coefficients_kernel, triton.cdiv(len(logps), BLOCK_T), logps,
            *(vector(x) for x in terms[:5]), losses, grad_logps, len(logps), *numbers,
            BLOCK_T=BLOCK_T, num_warps=4, **leaves,
        )  # fmt: skip
    return losses, grad_logps
