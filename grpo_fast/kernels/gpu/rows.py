"""Row kernels in Triton. One program processes one row of logits of any length.

    row_logps    logits -> lse, logps, entropy        HBM: one read of (C, V)
    row_grad_    logits, dL/dlogps -> d-logits        HBM: one read, one write
    row_loss_    row_logps, the loss, row_grad_       HBM: one read, one write (the second pass
                                                      reads the row from L2)

For bf16 logits, row_logps causes 2 bytes of HBM traffic per logit, and the other two functions
cause 4 bytes. The kernels compute:

    z = softcap·tanh(logit_scale·raw/softcap)/temperature
    p = softmax(z),   lp = log p[target],   H = -Σ p·log p
    d z_j = g·(1[j = target] - p_j) - g_H·p_j·(log p_j + H),   g = dL/dlp,   g_H = dL/dH
    d raw_j = d z_j · (1 - tanh²) · logit_scale / temperature

Sums are computed online in fp32. Each row has one running maximum, and each lane has one running
sum. At the end, the sums of the lanes are added in a fixed order. The results of a row depend on
that row only. Lengths, strides and hyperparameters are run-time arguments, so different values do
not cause recompilation.

Every launch sets `enable_fp_fusion=False`. Otherwise the compiler would decide from the surrounding
code whether to fuse a multiplication and an addition, and two kernels that share a function could
give different last bits for the same row.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from grpo_fast.kernels.gpu.launch import launch, multiprocessors, outputs
from grpo_fast.kernels.gpu.math import FLOOR, exp_fp32, expm1, final_logits, finish
from grpo_fast.kernels.gpu.tokens import loss_and_slope, loss_arguments
from grpo_fast.kernels.types import LogitRows, RowLoss, RowStats, vector
from grpo_fast.objective.coefficients import RowInputs
from grpo_fast.objective.config import LossConfig


class RowConfig(NamedTuple):
    """Block sizes of a row kernel, which processes a row BLOCK_V columns at a time.

    The loss kernel reads each row twice. If `programs_per_sm` is positive, only this number of
    programs runs on each multiprocessor, and each program computes several rows. The second read of
    a row may then hit the L2 cache. If it is 0, one program computes one row. `store_policy` is the
    eviction policy with which the gradient is stored.
    """

    block_v: int
    num_warps: int
    programs_per_sm: int = 0
    store_policy: str = ""


def row_config(vocab: int) -> RowConfig:
    """Return the block sizes of all row kernels. Equal block sizes give equal bits.

    With eight warps, a thread processes 8 columns. It needs one vector load for 16-bit logits and
    two for fp32 logits. With 16 columns per thread, registers would spill: with fp32 logits on
    sm_80, and with 16-bit logits on sm_120 and Triton 3.6. A small vocabulary uses a smaller block,
    because the lanes of a large block would mostly process padding.
    """
    return RowConfig(1024, 4) if vocab <= 1024 else RowConfig(2048, 8)


# Block sizes for the rows of token sets, which have tens to hundreds of logits each.
RAGGED = RowConfig(256, 2)


@triton.jit
def statistics(
    row_ptr, target, V, logit_scale, softcap, inv_temperature, ENTROPY: tl.constexpr,
    BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Compute lse, logp and entropy of a row in the first pass over its logits."""
    offs_v = tl.arange(0, BLOCK_V)
    # Load the target's logit now, because pass 2 may overwrite the row. The reductions below
    # contain barriers, which order this load before the stores of pass 2.
    inside = (target >= 0) & (target < V)
    raw_target = tl.load(row_ptr + target, mask=inside, other=0.0).to(tl.float32)
    z_target, target_slope = final_logits(raw_target, logit_scale, softcap, inv_temperature)
    row_max = tl.maximum(tl.where(inside, z_target, FLOOR), FLOOR)
    exp_sum = tl.zeros([BLOCK_V], tl.float32)
    exp_z_sum = tl.zeros([BLOCK_V], tl.float32)
    for start in range(0, V, BLOCK_V):
        cols = start + offs_v
        raw = tl.load(row_ptr + cols, mask=cols < V, other=0.0, eviction_policy="evict_last").to(
            tl.float32
        )
        z, _ = final_logits(raw, logit_scale, softcap, inv_temperature)
        # Exclude the target from the sum, because `finish` adds it separately to avoid
        # cancellation.
        z = tl.where((cols < V) & (cols != target), z, float("-inf"))
        # All lanes share one running maximum, so one exponential rescales the sums of all lanes.
        new_max = tl.maximum(row_max, tl.max(z, 0))
        rescale = exp_fp32(row_max - new_max)
        shifted = z - new_max
        e = exp_fp32(shifted)
        if ENTROPY:
            # Accumulate Σ e·(z - max). Computing the entropy from Σ e·z would subtract two numbers
            # as large as the logits, and lose digits.
            exp_z_sum = (exp_z_sum + (row_max - new_max) * exp_sum) * rescale + tl.where(
                e > 0, e * shifted, 0.0
            )
        exp_sum = exp_sum * rescale + e
        row_max = new_max
    return finish(row_max, tl.sum(exp_sum, 0), tl.sum(exp_z_sum, 0), z_target, inside)


@triton.jit
def write_gradient(
    row_ptr, out_ptr, target, lse, lp, entropy, g, g_entropy, V, logit_scale, softcap,
    inv_temperature, ENTROPY: tl.constexpr, BLOCK_V: tl.constexpr, STORE_POLICY: tl.constexpr,
):  # fmt: skip
    """Write the gradient with respect to the raw logits in the second pass over a row.

    If both coefficients of the row are 0, zeros are written and the row is not read.
    """
    offs_v = tl.arange(0, BLOCK_V)
    # The condition is the same for all threads of the program, so no warp diverges.
    if (g == 0.0) & (g_entropy == 0.0):
        for start in range(0, V, BLOCK_V):
            cols = start + offs_v
            tl.store(
                out_ptr + cols, tl.zeros([BLOCK_V], out_ptr.dtype.element_ty), mask=cols < V,
                eviction_policy=STORE_POLICY,
            )  # fmt: skip
    else:
        g_target = -g * expm1(lp)
        for start in range(0, V, BLOCK_V):
            cols = start + offs_v
            raw = tl.load(
                row_ptr + cols, mask=cols < V, other=0.0, eviction_policy="evict_first"
            ).to(tl.float32)
            z, slope = final_logits(raw, logit_scale, softcap, inv_temperature)
            logp = z - lse
            p = exp_fp32(logp)
            # Use g·(1 - p) = -g·expm1(logp) in the target column, because g - g·p would cancel if p
            # is close to 1.
            d = tl.where(cols == target, g_target, -g * p)
            if ENTROPY:
                d -= tl.where(p > 0, g_entropy * p * (logp + entropy), 0.0)
            tl.store(
                out_ptr + cols, (d * slope).to(out_ptr.dtype.element_ty), mask=cols < V,
                eviction_policy=STORE_POLICY,
            )  # fmt: skip


@triton.jit
def row_logps_kernel(
    logits_ptr, target_ptr, offset_ptr, lse_ptr, logps_ptr, entropy_ptr,
    V, stride_logits_t, logit_scale, softcap, temperature,
    BLOCK_V: tl.constexpr,
):  # fmt: skip
    # Compute the offset of the row in int64, because it may exceed 2^31 elements.
    row = tl.program_id(0).to(tl.int64)
    first = row * stride_logits_t
    # If the rows have unequal lengths, load the start and the length of the row.
    if offset_ptr is not None:
        first = tl.load(offset_ptr + row)
        V = tl.load(offset_ptr + row + 1) - first
    lse, lp, entropy = statistics(
        logits_ptr + first, tl.load(target_ptr + row), V, logit_scale, softcap,
        tl.div_rn(1.0, temperature), entropy_ptr is not None, BLOCK_V,
    )  # fmt: skip
    tl.store(lse_ptr + row, lse)
    tl.store(logps_ptr + row, lp)
    if entropy_ptr is not None:
        tl.store(entropy_ptr + row, entropy)


@triton.jit
def row_grad_kernel(
    logits_ptr, out_ptr, target_ptr, offset_ptr, lse_ptr, logps_ptr, entropy_ptr,
    grad_logps_ptr, grad_entropy_ptr, V, stride_logits_t, stride_out_t, logit_scale, softcap,
    temperature, BLOCK_V: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    first, first_out = row * stride_logits_t, row * stride_out_t
    if offset_ptr is not None:
        first = tl.load(offset_ptr + row)
        first_out = first
        V = tl.load(offset_ptr + row + 1) - first
    lse = tl.load(lse_ptr + row)
    entropy = lse
    g_entropy = tl.zeros([], tl.float32)
    if grad_entropy_ptr is not None:
        entropy = tl.load(entropy_ptr + row)
        g_entropy = tl.load(grad_entropy_ptr + row)
    write_gradient(
        logits_ptr + first, out_ptr + first_out, tl.load(target_ptr + row), lse,
        tl.load(logps_ptr + row), entropy, tl.load(grad_logps_ptr + row), g_entropy, V,
        logit_scale, softcap, tl.div_rn(1.0, temperature),
        grad_entropy_ptr is not None, BLOCK_V, "",
    )  # fmt: skip


@triton.jit(do_not_specialize=["n_rows"])
def row_loss_kernel(
    logits_ptr, out_ptr, target_ptr, advantages_ptr, policy_weights_ptr,
    kl_weights_ptr, old_logps_ptr, ref_logps_ptr, grad_entropy_ptr, lse_ptr, logps_ptr, entropy_ptr,
    losses_ptr, grad_logps_ptr, n_rows, V, stride_logits_t, stride_out_t, logit_scale, softcap,
    temperature, p0, p1, p2, p3, kl_max, kl_d_max, OBJECTIVE: tl.constexpr,
    N_PARAMS: tl.constexpr, KL: tl.constexpr, KL_TIMES_RATIO: tl.constexpr, ENTROPY: tl.constexpr,
    BLOCK_V: tl.constexpr, STORE_POLICY: tl.constexpr,
):  # fmt: skip
    for row_id in range(tl.program_id(0), n_rows, tl.num_programs(0)):
        row = tl.cast(row_id, tl.int64)
        # 1. Compute the statistics in the first pass.
        row_ptr = logits_ptr + row * stride_logits_t
        target = tl.load(target_ptr + row)
        # A row whose target id is outside [0, V) is excluded. It is not read, and its loss and
        # gradient are 0.
        counts = (target >= 0) & (target < V)
        width = tl.where(counts, V, 0)
        inv_temperature = tl.div_rn(1.0, temperature)
        lse, lp, entropy = statistics(
            row_ptr, target, width, logit_scale, softcap, inv_temperature, ENTROPY, BLOCK_V
        )
        tl.store(lse_ptr + row, lse)
        tl.store(logps_ptr + row, lp)
        if entropy_ptr is not None:
            tl.store(entropy_ptr + row, entropy)

        # 2. Compute the loss and its slope, which may be NaN in an excluded row.
        loss, g = loss_and_slope(
            lp, row, counts, advantages_ptr, policy_weights_ptr, kl_weights_ptr, old_logps_ptr,
            ref_logps_ptr, p0, p1, p2, p3, kl_max, kl_d_max, OBJECTIVE, N_PARAMS, KL,
            KL_TIMES_RATIO,
        )  # fmt: skip
        loss = tl.where(counts, loss, 0.0)
        g = tl.where(counts, g, 0.0)
        tl.store(losses_ptr + row, loss)
        tl.store(grad_logps_ptr + row, g)
        # 3. Write the gradient in the second pass, which reads the row from L2.
        g_entropy = tl.zeros([], tl.float32)
        if grad_entropy_ptr is not None:
            g_entropy = tl.load(grad_entropy_ptr + row, mask=counts, other=0.0)
        write_gradient(
            row_ptr, out_ptr + row * stride_out_t, target, lse, lp, entropy, g, g_entropy, V,
            logit_scale, softcap, inv_temperature, grad_entropy_ptr is not None, BLOCK_V,
            STORE_POLICY,
        )  # fmt: skip


def row_logps(rows: LogitRows, *, return_entropy: bool) -> RowStats:
    """Compute lse, logps and entropies of logits in Triton, like `reference.row_logps`.

    The logits are fp32, bf16 or fp16 with any row stride and a contiguous last dimension. If a
    target id is outside [0, V), its raw logit counts as 0, and nothing is read.
    """
    lse, logps, entropy = outputs(rows.target_ids, return_entropy)
    logits = rows.logits
    block_v, num_warps, *_ = row_config(logits.shape[1]) if rows.offsets is None else RAGGED
    launch(
        row_logps_kernel, len(rows.target_ids), logits, rows.target_ids.contiguous(), rows.offsets,
        lse, logps, entropy, logits.shape[1], logits.stride(0), *rows.transform,
        BLOCK_V=block_v, num_warps=num_warps,
    )  # fmt: skip
    return lse, logps, entropy


def row_grad_(
    rows: LogitRows, stats: RowStats, g: Tensor, g_entropy: Tensor | None, out: Tensor | None = None
) -> Tensor:
    """Write the gradient with respect to the logits in Triton, like `reference.row_grad_`.

    `out`, (C, V), must be the tensor `rows.logits` itself, or must not overlap it.
    """
    logits = rows.logits
    out = logits if out is None else out
    lse, logps, entropy = (vector(x) for x in stats)
    block_v, num_warps, *_ = row_config(logits.shape[1]) if rows.offsets is None else RAGGED
    launch(
        row_grad_kernel, len(rows.target_ids), logits, out, rows.target_ids.contiguous(),
        rows.offsets, lse, logps, None if g_entropy is None else entropy, vector(g),
        vector(g_entropy), logits.shape[1], logits.stride(0), out.stride(0), *rows.transform,
        BLOCK_V=block_v, num_warps=num_warps,
    )  # fmt: skip
    return out


def row_loss_(
    rows: LogitRows, out: Tensor, terms: RowInputs, config: LossConfig, *, return_entropy: bool
) -> RowLoss:
    """Compute the loss of every row and its gradient in Triton, like `reference.row_loss_`.

    The lse, logps and entropy are bitwise equal to the results of `row_logps`.
    """
    lse, logps, entropy = outputs(rows.target_ids, return_entropy)
    losses, grad_logps = torch.empty_like(lse), torch.empty_like(lse)
    *of_rows, grad_entropy = (vector(x) for x in terms)
    numbers, constants = loss_arguments(config)
    count, vocab = rows.logits.shape
    block_v, num_warps, per_sm, store_policy = row_config(vocab)
    programs = min(count, per_sm * multiprocessors(rows.logits.device)) if per_sm else count
    launch(
        row_loss_kernel, programs, rows.logits, out, rows.target_ids.contiguous(),
        *of_rows, grad_entropy, lse, logps, entropy, losses, grad_logps, count,
        vocab, rows.logits.stride(0), out.stride(0), *rows.transform, *numbers,
        ENTROPY=return_entropy or grad_entropy is not None, BLOCK_V=block_v,
        STORE_POLICY=store_policy, num_warps=num_warps, **constants,
    )  # fmt: skip
    return RowLoss(lse, logps, entropy, losses, grad_logps)
