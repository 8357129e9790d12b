"""Triton kernel for divergences from a teacher. One program processes one row of both models:

    z = transform(logits), y = transform(teacher);   lp = z - lse(z), lq = y - lse(y)
    D = Σ_j value_j(p_j, q_j),  dD/dz_j = slope_j - p_j·center,  center = Σ_k slope_k

The kernel makes four passes over a row:

1. Find the largest logit of the student and of the teacher.
2. Sum the exponentials of the other logits, which gives the lse of both models.
3. Compute values and slopes, and store the slopes in the gradient buffer.
4. Replace the slopes in the buffer with the gradient.

HBM traffic is 12 bytes per pair of logits: the first pass reads both in fp32, and the last pass
writes the gradient. All other reads hit L2. For the student's most likely logit, the gradient is
computed as (1 - p)·slope - p·(center - slope), which is accurate even if p is close to 1.

The divergence functions come from objective/kl.py. Sums are fp32 per lane and are reduced
in a fixed order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from grpo_fast.kernels.divergence import DivergenceRows, DivergenceTerm
from grpo_fast.kernels.gpu.launch import launch
from grpo_fast.kernels.gpu.math import exp_fp32, expm1, final_logits, log1p
from grpo_fast.kernels.gpu.tokens import device_function
from grpo_fast.kernels.types import LogitRows, vector
from grpo_fast.objective.kl import DIVERGENCES

# Number of columns and of warps per block, which gives each thread two columns. With these values,
# Triton 3.6 and 3.9 spill no registers on any architecture. With four columns per thread, registers
# would spill on sm_80 and sm_100. With eight warps, they would spill on sm_100 with Triton 3.6.
BLOCK_V, WARPS = 256, 4


@triton.jit
def load_final_logits(row_ptr, cols, V, logit_scale, softcap, inv_temperature):
    """Load raw logits of one row. Return the final logits z and the derivatives d z/d raw.

    Columns that are not in [0, V) get z = -inf.
    """
    # Load with evict_last to keep the row in L2, because it is read four times.
    raw = tl.load(row_ptr + cols, mask=cols < V, other=0.0, eviction_policy="evict_last")
    z, slope = final_logits(raw.to(tl.float32), logit_scale, softcap, inv_temperature)
    return tl.where(cols < V, z, float("-inf")), slope


@triton.jit
def row_normaliser(row_ptr, V, logit_scale, softcap, inv_temperature, BLOCK_V: tl.constexpr):
    """Compute the lse of a row of final logits in two parts. Return (top, row_max, rest).

    `top` is the column of the largest z, and `row_max` is its value. The lse is row_max + rest,
    where

        rest = log(1 + Σ_{j≠top} e^(z_j - row_max))
    """
    offs_v = tl.arange(0, BLOCK_V)
    best = tl.full([BLOCK_V], float("-inf"), tl.float32)
    best_col = offs_v
    for start in range(0, V, BLOCK_V):
        cols = start + offs_v
        z, unused = load_final_logits(row_ptr, cols, V, logit_scale, softcap, inv_temperature)
        # Compare with > instead of >=, so that the first of several equal columns is chosen.
        is_larger = z > best
        best = tl.where(is_larger, z, best)
        best_col = tl.where(is_larger, cols, best_col)
    row_max = tl.max(best, 0)
    top = tl.min(tl.where((best == row_max) & (best_col < V), best_col, V - 1), 0)
    shift = tl.where(row_max == float("-inf"), 0.0, row_max)
    exp_sum = tl.zeros([BLOCK_V], tl.float32)
    for start in range(0, V, BLOCK_V):
        cols = start + offs_v
        z, unused = load_final_logits(row_ptr, cols, V, logit_scale, softcap, inv_temperature)
        exp_sum += tl.where(cols == top, 0.0, exp_fp32(z - shift))
    return top, row_max, log1p(tl.sum(exp_sum, 0))


@triton.jit
def split_lse(lse):
    """Split an fp64 lse into an fp32 value and the fp32 remainder. Replace -inf with 0."""
    lse = tl.where(lse == float("-inf"), 0.0, lse)
    shift = lse.to(tl.float32)
    return shift, (lse - shift.to(tl.float64)).to(tl.float32)


@triton.jit
def row_divergence_kernel(
    logits_ptr, teacher_ptr, out_ptr, weights_ptr, known_ptr, sums_ptr,
    C, V, stride_logits_t, stride_teacher_t, stride_out_t, scale_p, softcap_p, temperature_p,
    scale_q, softcap_q, temperature_q, beta,
    DIVERGENCE: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Compute the divergence of one row and its gradient.

    Names that end in _p belong to the student, and names that end in _q to the teacher.
    """
    # 1. Compute the lse of student and teacher, or load them for a vocabulary shard.
    row = tl.program_id(0).to(tl.int64)
    row_p = logits_ptr + row * stride_logits_t
    row_q = teacher_ptr + row * stride_teacher_t
    inv_p = tl.div_rn(1.0, temperature_p)
    inv_q = tl.div_rn(1.0, temperature_q)
    top, lse_high_p, lse_low_p = row_normaliser(row_p, V, scale_p, softcap_p, inv_p, BLOCK_V)
    lse_p = lse_high_p.to(tl.float64) + lse_low_p.to(tl.float64)
    # `known` has the shape (4, C). Its rows are the values, the centers, the student's lse and the
    # teacher's lse.
    if known_ptr is None:
        top_q, lse_high_q, lse_low_q = row_normaliser(row_q, V, scale_q, softcap_q, inv_q, BLOCK_V)
        lse_q = lse_high_q.to(tl.float64) + lse_low_q.to(tl.float64)
        lse_high_p = tl.where(lse_high_p == float("-inf"), 0.0, lse_high_p)
        lse_high_q = tl.where(lse_high_q == float("-inf"), 0.0, lse_high_q)
    else:
        lse_p = tl.load(known_ptr + 2 * C + row)
        lse_q = tl.load(known_ptr + 3 * C + row)
        lse_high_p, lse_low_p = split_lse(lse_p)
        lse_high_q, lse_low_q = split_lse(lse_q)
    offs_v = tl.arange(0, BLOCK_V)
    values = tl.zeros([BLOCK_V], tl.float32)
    slope_sum = tl.zeros([BLOCK_V], tl.float32)
    # 2. Compute the value and the slope of the student's most likely logit now, because step 3 may
    # overwrite the teacher's logits with slopes.
    z_top, unused_p = load_final_logits(row_p, top, V, scale_p, softcap_p, inv_p)
    y_top, unused_q = load_final_logits(row_q, top, V, scale_q, softcap_q, inv_q)
    lp_top = (z_top - lse_high_p) - lse_low_p
    lq_top = (y_top - lse_high_q) - lse_low_q
    d_top = tl.where(lp_top == lq_top, 0.0, lp_top - lq_top)
    value_top, slope_top = DIVERGENCE(
        exp_fp32(lp_top), exp_fp32(lq_top), d_top, expm1(-tl.abs(d_top)), beta
    )
    # 3. Compute the values and slopes of all logits. Exclude the slope of the most likely logit
    # from the sum, because step 5 needs the sum of the other slopes.
    for start in range(0, V, BLOCK_V):
        cols = start + offs_v
        z, chain_p = load_final_logits(row_p, cols, V, scale_p, softcap_p, inv_p)
        y, chain_q = load_final_logits(row_q, cols, V, scale_q, softcap_q, inv_q)
        lp = (z - lse_high_p) - lse_low_p
        lq = (y - lse_high_q) - lse_low_q
        # Set the difference to 0 if both log-probabilities are -inf, because -inf - (-inf) is NaN.
        d = tl.where(lp == lq, 0.0, lp - lq)
        value, slope = DIVERGENCE(exp_fp32(lp), exp_fp32(lq), d, expm1(-tl.abs(d)), beta)
        values += tl.where(cols < V, value, 0.0)
        slope_sum += tl.where((cols < V) & (cols != top), slope, 0.0)
        if out_ptr is not None:
            tl.store(out_ptr + row * stride_out_t + cols, slope, mask=cols < V)
    # 4. Sum values and slopes over the row. These reductions contain barriers, which order the
    # stores of slopes in step 3 before the loads by other threads in step 5.
    center_others = tl.sum(slope_sum, 0).to(tl.float64)
    center = center_others + slope_top.to(tl.float64)
    if known_ptr is not None and out_ptr is not None:
        center = tl.load(known_ptr + C + row)
        center_others = center - slope_top.to(tl.float64)
    tl.store(sums_ptr + row, tl.sum(values, 0).to(tl.float64))
    tl.store(sums_ptr + C + row, center)
    tl.store(sums_ptr + 2 * C + row, lse_p)
    tl.store(sums_ptr + 3 * C + row, lse_q)
    if out_ptr is not None:
        # 5. Replace the slopes in `out` with the gradient.
        weight = tl.load(weights_ptr + row)
        d_top = -expm1(lp_top) * slope_top - exp_fp32(lp_top) * center_others.to(tl.float32)
        c = center.to(tl.float32)
        for start in range(0, V, BLOCK_V):
            cols = start + offs_v
            z, chain = load_final_logits(row_p, cols, V, scale_p, softcap_p, inv_p)
            to_ptr = out_ptr + row * stride_out_t + cols
            slope = tl.load(to_ptr, mask=cols < V, other=0.0)
            p = exp_fp32((z - lse_high_p) - lse_low_p)
            d = tl.where(cols == top, d_top, slope - c * p) * (weight * chain)
            # Write 0 in a row with weight 0. The product would keep a NaN, because 0·NaN is NaN.
            tl.store(to_ptr, tl.where(weight == 0.0, 0.0, d), mask=cols < V)


def row_divergence_(
    student: LogitRows,
    teacher: LogitRows,
    weights: Tensor,  # (C,)
    term: DivergenceTerm,
    *,
    out: Tensor | None = None,  # (C, V) fp32
    known: DivergenceRows | None = None,
) -> DivergenceRows:
    """Compute divergences and their gradient, like `divergence.row_divergence_`.

    The logits are fp32, without `offsets`. `out` must not be the student's logits.
    """
    logits = student.logits
    count, vocab = logits.shape
    sums = torch.empty((4, count), dtype=torch.float64, device=logits.device)
    launch(
        row_divergence_kernel, count, logits, teacher.logits, out, vector(weights),
        None if known is None else torch.stack(known), sums, count, vocab, logits.stride(0),
        teacher.logits.stride(0), 0 if out is None else out.stride(0), *student.transform,
        *teacher.transform, float(term.beta),
        DIVERGENCE=device_function(DIVERGENCES[term.kind]), BLOCK_V=BLOCK_V,
        num_warps=WARPS,
    )  # fmt: skip
    return DivergenceRows(*sums)
