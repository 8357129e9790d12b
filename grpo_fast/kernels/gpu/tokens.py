"""Triton kernels for vectors with one value per token. Each replaces many launches of torch.

`expanded` finds the completion of each token, and copies the inputs of the loss. One launch
replaces a binary search, the expansion of advantages from completions to tokens, and one copy per
input. It writes 8 bytes per token for the completion, and 4 bytes per token and input.

`row_coefficients` computes the loss of each token and its derivative dL/dlogp:

    losses[t] = policy_weights[t]·ℓ + kl_weights[t]·KL,  grad_logps[t] = d losses[t] / d logp[t]

It contains the functions of objective/losses.py and objective/kl.py, which Triton compiles from
their Python source. One launch replaces about twenty torch operations, and causes 24 to 36 bytes of
HBM traffic per row. The loss kernel in rows.py calls `loss_and_slope` between its two passes over a
row. If exponentials are stored, `join_kernel` in linear.py calls it, so that no further launch is
needed.

`extremes` computes the numbers for the late checks (loss/checks.py): minimum, maximum and the least
step from one element to the next. Up to VECTORS vectors share a launch, with one program each.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from grpo_fast.kernels.gpu.launch import ceil_div, launch
from grpo_fast.kernels.gpu.math import exp_fp32, expm1, expm1_minus, log1p
from grpo_fast.kernels.types import vector
from grpo_fast.objective.coefficients import RowInputs
from grpo_fast.objective.config import LossConfig
from grpo_fast.objective.kl import KL_ESTIMATORS
from grpo_fast.objective.losses import LOG_RATIO_MAX, OBJECTIVES, TokenFunction, bind

# ----------------------------------------------------------------- Completions and inputs of tokens
BLOCK = 512  # tokens of a program
# Maximum number of inputs with one value per token.
INPUTS = 3


@triton.jit
def copy_values(x_ptr, at, out_ptr, tokens, inside):
    """Copy the values at the positions `at` of x to fp32 numbers."""
    x = tl.load(x_ptr + at, mask=inside, other=0.0)
    tl.store(out_ptr + tokens, x.to(tl.float32), mask=inside)


@triton.jit(do_not_specialize=["n_tokens", "n_inner", "length", "stride_out"])
def tokens_kernel(
    index_ptr, cu_ptr, advantages_ptr, x_1, x_2, x_3, segment_ptr, out_ptr, n_tokens, n_inner,
    length, stride_out, PER_TOKEN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Find the completions of BLOCK tokens, and copy their values.

    `out` has one row for the advantages, and one for each of x_1, x_2 and x_3 that is not None.
    """
    tokens = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = tokens < n_tokens
    row = tokens.to(tl.int64)
    if index_ptr is not None:
        row = tl.load(index_ptr + tokens, mask=inside, other=0)
    # 1. Find the completion. With offsets, it is the number of inner offsets that are at most the
    # row. In the padded layout, it is row // length. Invalid offsets give a wrong completion, but
    # never one out of range.
    segment = row // length
    if cu_ptr is not None:
        low = tl.zeros([BLOCK], tl.int32)
        high = low + n_inner
        left = n_inner
        while left > 0:
            middle = (low + high) // 2
            is_open = low < high
            offset = tl.load(cu_ptr + 1 + middle, mask=is_open, other=0)
            is_right = is_open & (offset <= row)
            high = tl.where(is_open & (offset > row), middle, high)
            low = tl.where(is_right, middle + 1, low)
            left = left // 2
        segment = low.to(tl.int64)
    tl.store(segment_ptr + tokens, segment, mask=inside)
    # 2. Copy the values.
    at = row
    if not PER_TOKEN:
        at = segment
    copy_values(advantages_ptr, at, out_ptr, tokens, inside)
    others = (x_1, x_2, x_3)
    for i in tl.static_range(3):
        if others[i] is not None:
            copy_values(others[i], row, out_ptr + (i + 1) * stride_out, tokens, inside)


def expanded(
    index: Tensor | None,  # (T,) int64
    cu_seqlens: Tensor | None,  # (B+1,)
    num_rows: int,
    count: int,
    advantages: Tensor,  # (B,) or (N,)
    others: Sequence[Tensor],  # (N,) each
    *,
    per_token: bool,
) -> tuple[Tensor, Tensor]:
    """Return the completion of each token, and copies of its values.

    Args:
        index: (T,), int64. The rows of the active tokens. None: all N rows.
        cu_seqlens: (B+1,), the offsets of the completions. None: they all have the same length.
        num_rows: N.
        count: B, the number of completions.
        advantages: (B,) or, with `per_token`, (N,), any float dtype.
        others: up to three vectors (N,), any float dtype.
        per_token: whether there is one advantage per token.

    Returns:
        A pair (segments, values): (T,) int64, and (1 + len(others), T) fp32.
    """
    tokens = num_rows if index is None else index.shape[0]
    segments = torch.empty(tokens, dtype=torch.int64, device=advantages.device)
    # Align each row to 16 bytes, so that kernels need not be compiled for other alignments.
    stride = ceil_div(tokens, 4) * 4
    shape = 1 + len(others), stride
    values = torch.empty(shape, dtype=torch.float32, device=advantages.device)
    inputs: list[Tensor | None] = [x.contiguous() for x in (advantages, *others)]
    inputs += [None] * (INPUTS - len(others))
    offsets = None if cu_seqlens is None else cu_seqlens.contiguous()
    length = max(num_rows // max(count, 1), 1)
    launch(
        tokens_kernel, ceil_div(tokens, BLOCK), index, offsets, *inputs, segments, values, tokens,
        count - 1, length, stride, PER_TOKEN=per_token, BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
    return segments, values if stride == tokens else values[:, :tokens]


# ------------------------------------------------------------------------------------------- Losses
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
    words = {"tl": tl, "expm1": expm1, "expm1_minus": expm1_minus, "log1p": log1p}
    return bind(function, words, triton.jit)


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
    logps: Tensor, terms: RowInputs, config: LossConfig
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


# ------------------------------------------------------------------------------ Extremes of vectors
VECTORS = 8  # maximum number of vectors in a launch
READ = 2048  # number of elements that a program reads at a time


@triton.jit
def find_extremes(x_ptr, size, vector, out_ptr, BLOCK: tl.constexpr):
    """Write minimum, maximum and least step of x. Programs of other vectors do nothing."""
    if tl.program_id(0) == vector:
        infinity = tl.full([BLOCK], float("inf"), tl.float64)
        low = infinity
        high = -infinity
        step = infinity
        is_nan = tl.zeros([BLOCK], tl.int32)
        for start in range(0, size, BLOCK):
            at = start + tl.arange(0, BLOCK)
            inside = at < size
            has_next = at + 1 < size
            x = tl.load(x_ptr + at, mask=inside, other=0).to(tl.float64)
            after = tl.load(x_ptr + at + 1, mask=has_next, other=0).to(tl.float64)
            is_nan |= (inside & (x != x)).to(tl.int32)
            low = tl.minimum(low, tl.where(inside, x, infinity))
            high = tl.maximum(high, tl.where(inside, x, -infinity))
            step = tl.minimum(step, tl.where(has_next, after - x, infinity))
        has_nan = tl.max(is_nan, 0) > 0
        out = out_ptr + 3 * vector
        tl.store(out, tl.where(has_nan, float("nan"), tl.min(low, 0)))
        tl.store(out + 1, tl.where(has_nan, float("nan"), tl.max(high, 0)))
        tl.store(out + 2, tl.min(step, 0))


@triton.jit(do_not_specialize=[f"size_{i}" for i in range(VECTORS)])
def extremes_kernel(
    x_0, size_0, x_1, size_1, x_2, size_2, x_3, size_3, x_4, size_4, x_5, size_5, x_6, size_6, x_7,
    size_7, out_ptr, BLOCK: tl.constexpr,
):  # fmt: skip
    vectors = (x_0, x_1, x_2, x_3, x_4, x_5, x_6, x_7)
    sizes = (size_0, size_1, size_2, size_3, size_4, size_5, size_6, size_7)
    for i in tl.static_range(8):
        if vectors[i] is not None:
            find_extremes(vectors[i], sizes[i], i, out_ptr, BLOCK)


def extremes(vectors: Sequence[Tensor]) -> Tensor:
    """Return the minimum, the maximum and the least step of each vector, (count, 3) fp64.

    The vectors are not empty. Minimum and maximum are NaN if the vector contains NaN. The step of a
    single value is inf.
    """
    out = torch.empty((len(vectors), 3), dtype=torch.float64, device=vectors[0].device)
    for first in range(0, len(vectors), VECTORS):
        group = vectors[first : first + VECTORS]
        arguments: list[object] = []
        for x in group:
            arguments += (x.contiguous(), x.numel())
        arguments += (None, 0) * (VECTORS - len(group))
        here = out[first:] if first else out  # a view takes the host a microsecond
        launch(extremes_kernel, len(group), *arguments, here, BLOCK=READ, num_warps=8)
    return out
