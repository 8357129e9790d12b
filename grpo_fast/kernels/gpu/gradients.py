"""Triton kernels that run before and after the GEMMs that compute gradients from exponentials.

    times          by_row = dL/dlogps·unit,  by_target = dL/dlogps·target_unit
    write_hidden_  dH[t] = by_row[t]·P[t] + by_target[t]·W[y_t], P = E·W in fp32, rounded once
    scaled_hidden  by_row[t]·hidden[t] in 16 bits, the second operand of dW = Eᵀ·(…)
    add_targets_   the contribution of the targets to dW (target_rows.py)
    scale_         gradients *= upstream gradient, in the backward pass

linear.py defines the matrix E of exponentials, unit and target_unit. y_t is the target of row
t. For each element of a (C, H) matrix, write_hidden_ causes 10 bytes of HBM traffic, and
scaled_hidden 4 bytes. A coefficient of 0 gives exact zeros, even in rows with NaN. scale_ reads and
writes each gradient once. If its factor is 1, as in `loss.backward()`, every program returns
immediately. The programs check this themselves, because the factor is on the device, and the host
would have to synchronise to read it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from grpo_fast.kernels.gpu.launch import ceil_div, launch
from grpo_fast.kernels.gpu.math import exponential_coefficients
from grpo_fast.kernels.gpu.target_rows import add_targets_ as add_targets_
from grpo_fast.kernels.gpu.target_rows import sorted_targets as sorted_targets
from grpo_fast.kernels.types import Exponentials, LogitTransform, vector

BLOCK_T, BLOCK_H = 128, 1024
# Number of elements that a program processes per step.
SCALE_BLOCK = 4096
# Maximum number of programs. It is large enough to keep any device busy. It is small enough that,
# for an upstream gradient of 1, all programs start and return within microseconds.
SCALE_PROGRAMS = 2048


@triton.jit(do_not_specialize=["n_rows", "n_padded"])
def times_kernel(
    grad_logps_ptr, raw_target_ptr, lse_ptr, logps_ptr, by_row_ptr, by_target_ptr,
    n_rows, n_padded, logit_scale, softcap, temperature, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Compute the coefficients by_row and by_target of BLOCK_T rows."""
    rows = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    in_rows = rows < n_rows
    g = tl.load(grad_logps_ptr + rows, mask=in_rows, other=0.0)
    lse = tl.load(lse_ptr + rows, mask=in_rows, other=0.0)
    lp = tl.load(logps_ptr + rows, mask=in_rows, other=0.0)
    by_row, by_target = exponential_coefficients(
        g, lp, lse, rows, in_rows, raw_target_ptr, logit_scale, softcap, temperature
    )
    # Write coefficients of 0 for padding rows (n_rows <= row < n_padded), whose exponentials are
    # undefined.
    inside = rows < n_padded
    tl.store(by_row_ptr + rows, by_row, mask=inside)
    tl.store(by_target_ptr + rows, by_target, mask=inside)


@triton.jit
def write_scaled_row(hidden_ptr, out_ptr, by_row, H, BLOCK_H: tl.constexpr):
    """Write by_row·hidden for one row. If by_row is 0, write zeros without reading `hidden`."""
    read = tl.where(by_row == 0.0, 0, H)
    for start in range(0, H, BLOCK_H):
        cols = start + tl.arange(0, BLOCK_H)
        h = tl.load(hidden_ptr + cols, mask=cols < read, other=0.0)
        scaled = tl.where(by_row == 0.0, 0.0, h.to(tl.float32) * by_row)
        tl.store(out_ptr + cols, scaled.to(out_ptr.dtype.element_ty), mask=cols < H)


@triton.jit(do_not_specialize=["n_rows"])
def write_hidden_kernel(
    product_ptr, by_row_ptr, by_target_ptr, target_ptr, weight_ptr, out_ptr, hidden_ptr, scaled_ptr,
    n_rows, H, stride_product_t, stride_weight_v, stride_weight_h, stride_out_t, stride_hidden_t,
    stride_scaled_t, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Compute one row of dH from the product E·W and the weight row of the target.

    If `scaled_ptr` is given, also write by_row·hidden.
    """
    row = tl.program_id(0).to(tl.int64)
    by_row, by_target = tl.load(by_row_ptr + row), tl.load(by_target_ptr + row)
    if scaled_ptr is not None:
        write_scaled_row(
            hidden_ptr + row * stride_hidden_t, scaled_ptr + row * stride_scaled_t, by_row, H,
            BLOCK_H,
        )  # fmt: skip
    # A padding row has no row of dH.
    width = tl.where(row < n_rows, H, 0)
    target = tl.load(target_ptr + row, mask=row < n_rows, other=0).to(tl.int64)
    # Load no elements of the weight row if by_target is 0, because the target id may then be
    # invalid.
    read = tl.where(by_target == 0.0, 0, width)
    for start in range(0, width, BLOCK_H):
        cols = start + tl.arange(0, BLOCK_H)
        inside = cols < width
        x = tl.load(product_ptr + row * stride_product_t + cols, mask=inside, other=0.0)
        at = weight_ptr + target * stride_weight_v + cols.to(tl.int64) * stride_weight_h
        w = tl.load(at, mask=cols < read, other=0.0).to(tl.float32)
        # Use 0 in a row with coefficient 0. The product would keep a NaN, because 0·NaN is NaN.
        total = tl.where(by_row == 0.0, 0.0, x * by_row)
        total += tl.where(by_target == 0.0, 0.0, w * by_target)
        to = out_ptr + row * stride_out_t + cols
        tl.store(to, total.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def scaled_hidden_kernel(
    hidden_ptr, by_row_ptr, out_ptr, H, stride_hidden_t, stride_out_t,
    BLOCK_H: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    write_scaled_row(
        hidden_ptr + row * stride_hidden_t, out_ptr + row * stride_out_t,
        tl.load(by_row_ptr + row), H, BLOCK_H,
    )  # fmt: skip


def times(
    grad_logps: Tensor, filled: Exponentials, transform: LogitTransform, rows: int
) -> tuple[Tensor, Tensor]:
    """Compute by_row and by_target from dL/dlogps, with zeros in the padding rows.

    Args:
        grad_logps: (C,), fp32.
        filled: the result of `head_exponentials` for the C rows.
        transform: the logit transform.
        rows: the padded C.

    Returns:
        (by_row, by_target), (padded C,) each.
    """
    lse, logps, _ = filled.stats
    by_row, by_target = (torch.empty(rows, dtype=torch.float32, device=lse.device) for _ in "rt")
    launch(
        times_kernel, ceil_div(rows, BLOCK_T), vector(grad_logps), filled.raw_target, lse, logps,
        by_row, by_target, lse.shape[0], rows, *transform, BLOCK_T=BLOCK_T, num_warps=4,
    )  # fmt: skip
    return by_row, by_target


def write_hidden_(
    out: Tensor,  # (C, H)
    product: Tensor,  # (padded C, H) fp32
    by_row: Tensor,  # (padded C,) fp32
    by_target: Tensor,  # (padded C,) fp32
    target_ids: Tensor,  # (C,)
    weight: Tensor,  # (V, H)
    hidden: Tensor | None = None,  # (padded C, H)
) -> Tensor | None:  # (padded C, H)
    """Write dH[t] = by_row[t]·product[t] + by_target[t]·weight[target_ids[t]] to `out`.

    With `hidden`, also return `scaled_hidden(hidden, by_row, hidden.dtype)` from the same launch.
    """
    count = target_ids.shape[0]
    scaled = None
    if hidden is not None:
        scaled = torch.empty(hidden.shape, dtype=hidden.dtype, device=hidden.device)
    launch(
        write_hidden_kernel, count if hidden is None else hidden.shape[0], product, by_row,
        by_target, target_ids, weight, out, hidden, scaled, count, weight.shape[1],
        product.stride(0), weight.stride(0), weight.stride(1), out.stride(0),
        0 if hidden is None else hidden.stride(0), weight.shape[1], BLOCK_H=BLOCK_H, num_warps=4,
    )  # fmt: skip
    return scaled


def scaled_hidden(hidden: Tensor, by_row: Tensor, dtype: torch.dtype) -> Tensor:
    """Multiply the rows of `hidden`, (C, H), by `by_row`, (C,), and round them to `dtype` once."""
    out = torch.empty(hidden.shape, dtype=dtype, device=hidden.device)
    launch(
        scaled_hidden_kernel, hidden.shape[0], hidden, by_row, out, hidden.shape[1],
        hidden.stride(0), out.stride(0), BLOCK_H=BLOCK_H, num_warps=4,
    )  # fmt: skip
    return out


@triton.jit
def scale_one(gradient_ptr, factor_ptr, size, BLOCK: tl.constexpr):
    """Multiply a gradient by its factor, or return immediately if the factor is 1."""
    factor = tl.load(factor_ptr).to(tl.float32)
    if factor != 1.0:
        # Process several blocks per program, because at most SCALE_PROGRAMS programs are launched.
        step = tl.num_programs(0).to(tl.int64) * BLOCK
        first = tl.program_id(0).to(tl.int64) * BLOCK
        for start in range(first, tl.cast(size, tl.int64), step):
            at = start + tl.arange(0, BLOCK)
            values = tl.load(gradient_ptr + at, mask=at < size, other=0.0).to(tl.float32)
            tl.store(
                gradient_ptr + at, (values * factor).to(gradient_ptr.dtype.element_ty), mask=at <
                size,
            )  # fmt: skip


@triton.jit(do_not_specialize=["size_0", "size_1", "size_2"])
def scale_kernel(
    gradient_0, factor_0, size_0, gradient_1, factor_1, size_1, gradient_2, factor_2, size_2,
    BLOCK: tl.constexpr,
):  # fmt: skip
    gradients = (gradient_0, gradient_1, gradient_2)
    factors = (factor_0, factor_1, factor_2)
    sizes = (size_0, size_1, size_2)
    for i in tl.static_range(3):
        if gradients[i] is not None:
            scale_one(gradients[i], factors[i], sizes[i], BLOCK)


def scale_(gradients: Sequence[Tensor], factors: Sequence[Tensor]) -> None:
    """Multiply up to three contiguous gradients by their one-element factors in place.

    The dtypes of the gradients must have at most 32 bits, because the products are computed in
    fp32.
    """
    arguments: list[object] = []
    for gradient, factor in zip(gradients, factors, strict=True):
        arguments += gradient, factor.detach(), gradient.numel()
    largest = max(x.numel() for x in gradients)
    launch(
        scale_kernel, min(ceil_div(largest, SCALE_BLOCK), SCALE_PROGRAMS), *arguments,
        *(None, None, 0) * (3 - len(gradients)), BLOCK=SCALE_BLOCK, num_warps=8,
    )  # fmt: skip
