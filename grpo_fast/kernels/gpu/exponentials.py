"""LM head fused with log-softmax, with exponentials stored in 16 bits for the gradient GEMMs.

The matrix E is written once, before the loss is known:

    E_j = exp(z_j - s)·f_j, 0 in the target column,             f = 1 - tanh² (1 without a soft cap)
    d raw_j = g·unit·E_j,               unit = -exp(s - lse)·logit_scale/temperature
    d raw_y = g·target_unit,            target_unit = (1 - p_y)·f_y·logit_scale/temperature

Here y is the target's column, s is a number that is chosen for each row, and g is dL/dlogp. The
factor g·unit scales the rows of dH = E·W and the rows of `hidden` in dW = Eᵀ·hidden, so E is never
modified. In addition to the HBM traffic of linear.py, the kernel writes 2 bytes per logit.

The d-logit of the target is the largest of its row, so the target is excluded from E. Its
contribution is added in fp32: each row of dH gets a multiple of one row of W, and one row of dW
gets a multiple of a row of `hidden`. Nothing cancels when p_y is close to 1.

The exact value of s does not matter, because bf16 has the same relative precision everywhere.
However, s must be close to lse, and must be known before the row is computed. The kernel uses s =
z[target], which costs one dot product per row (target_kernel). The distance lse - s is then -logp.
Rows with -logp > MAX_NLL and rows with NaN are computed a second time with s = lse. The host need
not know which rows these are, because the second launch covers all rows, and the programs of all
other rows return immediately. All elements of E are finite, even in rows with NaN, so a row with g
= 0 contributes nothing.

The lse, logp and entropy are bitwise equal to those of `head_logps`, because the same kernel
computes them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from grpo_fast.kernels.gpu.launch import launch
from grpo_fast.kernels.gpu.linear import prepared, statistics, sweep
from grpo_fast.kernels.types import Exponentials, HeadInputs, RowStats, vector
from grpo_fast.objective.coefficients import RowTerms
from grpo_fast.objective.config import LossConfig


@triton.jit
def target_kernel(
    hidden_ptr, weight_ptr, bias_ptr, target_ptr, raw_ptr,
    V, H, stride_hidden_t, stride_weight_v, stride_weight_h, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Compute the raw logit of the target of one row. It is 0 if the target is outside [0, V)."""
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(target_ptr + row)
    inside = (target >= 0) & (target < V)
    depth = tl.where(inside, H, 0)  # load nothing for an invalid id
    total = tl.zeros([BLOCK_H], tl.float32)
    for start in range(0, H, BLOCK_H):
        offs_h = start + tl.arange(0, BLOCK_H)
        mask = offs_h < depth
        h = tl.load(hidden_ptr + row * stride_hidden_t + offs_h, mask=mask, other=0.0).to(
            tl.float32
        )
        # Use int64 offsets. If the weight is transposed (column stride V), they reach H·V, which
        # may exceed 2^31.
        at = weight_ptr + target * stride_weight_v + offs_h.to(tl.int64) * stride_weight_h
        w = tl.load(at, mask=mask, other=0.0)
        total += h * w.to(tl.float32)
    raw = tl.sum(total, 0)
    if bias_ptr is not None:
        raw += tl.load(bias_ptr + target, mask=inside, other=0.0).to(tl.float32)
    tl.store(raw_ptr + row, raw)


def target_logits(p: HeadInputs) -> Tensor:
    """Return the raw logits of the targets, (T,) fp32."""
    raw = torch.empty(p.hidden.shape[0], dtype=torch.float32, device=p.hidden.device)
    launch(
        target_kernel, raw.shape[0], p.hidden, p.weight, p.bias, p.target_ids, raw,
        p.weight.shape[0], p.hidden.shape[1], p.hidden.stride(0), p.weight.stride(0),
        p.weight.stride(1), BLOCK_H=512, num_warps=2,
    )  # fmt: skip
    return raw


def head_exponentials(
    p: HeadInputs,  # (T, H), (V, H) and (V,) in bf16, (T,)
    out: Tensor,  # (T, V) bf16, contiguous last dimension, any row stride
    *,
    return_entropy: bool = False,
    known: RowStats | None = None,
    loss: tuple[RowTerms, LossConfig] | None = None,
) -> Exponentials:
    """Compute statistics and write exponentials in bf16, like `cpu/linear.head_exponentials`.

    If a target id is outside [0, V), logp and entropy of its row are 0. The result has no units,
    which `gradients.times` computes. `dominant` is always None, because the GEMM uses the stored
    bf16 values without further rounding. With `loss`, the result includes a token-level loss.
    """
    p = prepared(p)
    # 1. Compute the raw logits of the targets. The kernel uses the final logit of the target as s.
    raw_target = target_logits(p)
    # 2. Compute statistics and exponentials in one pass, unless the statistics are known from an
    # earlier pass.
    found = None
    if known is None:
        stats, found = statistics(
            p, return_entropy=return_entropy, out=out, raw_target=raw_target, loss=loss
        )
    else:
        lse, logps, entropy = known
        stats = vector(lse), vector(logps), entropy
    # 3. Recompute the exponentials of the rows that need s = lse. If step 2 computed no
    # exponentials, compute them for all rows.
    sweep(p, None, out, raw_target, stats[0], only_high_nll=known is None)
    return Exponentials(stats, None, None, None, raw_target, found)
