"""A row kernel that keeps a part of each row in registers between its two passes.

The loss kernel of grpo_fast/kernels/gpu/rows.py reads each row of logits twice. With one program on
each of 132 multiprocessors, 40 MB of rows are in flight. The L2 cache of an H100 has two parts of
25 MB, so the second read may miss. The kernel in this module keeps the first KEPT blocks of a row
in registers, as pairs of 16-bit logits, and reads only the rest a second time. The loads of the
rest are pipelined: they are in flight while earlier blocks are processed.

With GIVEN, the first pass subtracts `target logit - old logp`, which is near the lse, in place of a
running maximum. A block then needs no reduction over the threads of a program. If the lse of a row
is far from this number, its sum overflows. linear.py computes such rows again in a second
launch, which this candidate does not have. With GIVEN, the last bits of a logp differ from those of
`row_logps`, so an on-policy ratio would not be exactly 1.

This kernel is a candidate (see row_candidates.py) and not part of the package. It has no soft cap,
no temperature and no entropy.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from grpo_fast.kernels.gpu.launch import launch, multiprocessors
from grpo_fast.kernels.gpu.math import FLOOR, exp_fp32, expm1, finish
from grpo_fast.kernels.gpu.tokens import loss_and_slope, loss_arguments
from grpo_fast.kernels.types import LogitRows, RowLoss
from grpo_fast.objective.coefficients import RowTerms
from grpo_fast.objective.config import LossConfig


@triton.jit
def halves(pairs):
    """Return the two bf16 numbers in each int32, as fp32."""
    low = (pairs << 16).to(tl.float32, bitcast=True)
    return low, (pairs & -65536).to(tl.float32, bitcast=True)


@triton.jit
def add_pairs(row_max, exp_sum, pairs, at_target, rest, GIVEN: tl.constexpr, ALL: tl.constexpr):
    """Add a block of logits to the running maximum and sum, except the target.

    `at_target` is the distance of the target from each pair of the block, in logits. `rest` is the
    number of pairs from the start of the block to the end of the row. With ALL, it is not read.
    """
    low, high = halves(pairs)
    low = tl.where(at_target != 0, low, float("-inf"))
    high = tl.where(at_target != 1, high, float("-inf"))
    if not ALL:
        in_row = tl.arange(0, pairs.shape[0]) < rest
        low = tl.where(in_row, low, float("-inf"))
        high = tl.where(in_row, high, float("-inf"))
    if not GIVEN:
        new_max = tl.maximum(row_max, tl.max(tl.maximum(low, high), 0))
        exp_sum = exp_sum * exp_fp32(row_max - new_max)
        row_max = new_max
    return row_max, exp_sum + exp_fp32(low - row_max) + exp_fp32(high - row_max)


@triton.jit
def gradient_pairs(pairs, at_target, lse, g, g_target):
    """Return the gradient of a block of logits as pairs."""
    low, high = halves(pairs)
    low = tl.where(at_target == 0, g_target, -g * exp_fp32(low - lse))
    high = tl.where(at_target == 1, g_target, -g * exp_fp32(high - lse))
    low = low.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32) & 65535
    return low | (high.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32) << 16)


@triton.jit(do_not_specialize=["n_rows", "zero"])
def kept_rows_kernel(
    logits_ptr, out_ptr, target_ptr, advantages_ptr, policy_weights_ptr, old_logps_ptr, lse_ptr,
    logps_ptr, losses_ptr, grad_logps_ptr, n_rows, V, stride_logits_t, stride_out_t, p0, p1, p2, p3,
    zero, OBJECTIVE: tl.constexpr, N_PARAMS: tl.constexpr, BLOCK: tl.constexpr, KEPT: tl.constexpr,
    GIVEN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    offs = tl.arange(0, BLOCK)
    n_pairs = V // 2
    for row_id in range(tl.program_id(0), n_rows, tl.num_programs(0)):
        row = tl.cast(row_id, tl.int64)
        target = tl.load(target_ptr + row).to(tl.int32)
        z_target = tl.load(logits_ptr + row * stride_logits_t + target).to(tl.float32)
        pairs_ptr = (logits_ptr + row * stride_logits_t).to(tl.pointer_type(tl.int32)) + offs
        # Compute the distance from block 0 here, and subtract the first column of each block below.
        # Otherwise, the compiler would compute the columns of all blocks before the loop, and keep
        # them in registers.
        at_target = target - 2 * offs
        # 1. Compute the statistics, and keep the first blocks.
        exp_sum = tl.zeros([BLOCK], tl.float32)
        row_max = tl.maximum(z_target, FLOOR)
        if GIVEN:
            row_max = z_target - tl.load(old_logps_ptr + row)
        kept = ()
        for i in tl.static_range(KEPT):
            pairs = tl.load(pairs_ptr + i * BLOCK, eviction_policy="evict_first")
            row_max, exp_sum = add_pairs(
                row_max, exp_sum, pairs, at_target - 2 * i * BLOCK, BLOCK, GIVEN, True
            )
            kept = kept + (pairs,)  # type: ignore[assignment]
        for start in tl.range(KEPT * BLOCK, n_pairs, BLOCK, num_stages=STAGES):
            pairs = tl.load(
                pairs_ptr + start, mask=offs < n_pairs - start, other=0,
                eviction_policy="evict_last",
            )  # fmt: skip
            row_max, exp_sum = add_pairs(
                row_max, exp_sum, pairs, at_target - 2 * start, n_pairs - start, GIVEN, False
            )
        lse, lp, _ = finish(row_max, tl.sum(exp_sum, 0), 0.0, z_target, True)
        tl.store(lse_ptr + row, lse)
        tl.store(logps_ptr + row, lp)
        # 2. Compute the loss and its slope.
        loss, g = loss_and_slope(
            lp, row, True, advantages_ptr, policy_weights_ptr, None, old_logps_ptr, None, p0, p1,
            p2, p3, 0.0, 0.0, OBJECTIVE, N_PARAMS, None, False,
        )  # fmt: skip
        tl.store(losses_ptr + row, loss)
        tl.store(grad_logps_ptr + row, g)
        # 3. Write the gradient, first that of the kept blocks. The operations with `zero` change
        # nothing. Without them, the compiler would keep unpacked numbers and comparisons of pass 1.
        out_pairs = (out_ptr + row * stride_out_t).to(tl.pointer_type(tl.int32)) + offs
        g_target = -g * expm1(lp)
        at_target += zero
        for i in tl.static_range(KEPT):
            d = gradient_pairs(kept[i] ^ zero, at_target - 2 * i * BLOCK, lse, g, g_target)
            tl.store(out_pairs + i * BLOCK, d, eviction_policy="evict_first")
        for start in tl.range(KEPT * BLOCK, n_pairs, BLOCK, num_stages=STAGES):
            in_row = offs < n_pairs - start
            pairs = tl.load(pairs_ptr + start, mask=in_row, other=0, eviction_policy="evict_first")
            d = gradient_pairs(pairs, at_target - 2 * start, lse, g, g_target)
            tl.store(out_pairs + start, d, mask=in_row, eviction_policy="evict_first")


class KeptRows(NamedTuple):
    """Sizes of `kept_rows_kernel`.

    Attributes:
        block: number of pairs of logits that a program processes at a time.
        num_warps: warps of a program.
        kept: number of blocks of a row that stay in registers.
        stages: number of blocks of the rest whose loads are in flight, plus one.
        given: whether `target logit - old logp` replaces the running maximum.
    """

    block: int
    num_warps: int
    kept: int
    stages: int
    given: bool


def kept_row_loss_(
    sizes: KeptRows,
    rows: LogitRows,
    out: Tensor,  # (C, V)
    terms: RowTerms,
    config: LossConfig,
    *,
    return_entropy: bool,
) -> RowLoss:
    """Compute the loss of every row and its gradient, as `row_loss_` does.

    The logits are bf16 and contiguous, with an even number of columns. Every row must have a valid
    target, and with `given` an old logp near the new one. A KL, entropies, and a transform of the
    logits are not supported.
    """
    logits, target_ids, transform, _ = rows
    assert transform == (1.0, None, 1.0) and not return_entropy and terms.kl_weights is None
    vocab = logits.shape[1]
    assert vocab >= 2 * sizes.block * sizes.kept  # the kept blocks are loaded without a mask
    assert all(x % 2 == 0 for x in (vocab, logits.stride(0), out.stride(0)))
    lse, logps, losses, grad_logps = (
        torch.empty(len(logits), dtype=torch.float32, device=logits.device) for _ in range(4)
    )
    numbers, constants = loss_arguments(config)
    launch(
        kept_rows_kernel, min(len(logits), multiprocessors(logits.device)), logits, out, target_ids,
        terms.advantages, terms.policy_weights, terms.old_logps, lse, logps, losses, grad_logps,
        *logits.shape, logits.stride(0), out.stride(0), *numbers[:4], 0,
        OBJECTIVE=constants["OBJECTIVE"], N_PARAMS=constants["N_PARAMS"], BLOCK=sizes.block,
        KEPT=sizes.kept, GIVEN=sizes.given, STAGES=sizes.stages, num_warps=sizes.num_warps,
    )  # fmt: skip
    return RowLoss(lse, logps, None, losses, grad_logps)
