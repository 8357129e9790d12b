"""What surrounds the two gradient GEMMs of a matrix of exponentials (exponentials.py), one pass each.

    times            by_row, by_target: dL/dlogps times the units of a row and of its target
    write_hidden_    dH[t] = by_row[t]·P[t] + by_target[t]·W[y_t], P = E·W in fp32, rounded once
    scaled_hidden    by_row[t]·hidden[t] in 16 bits, the second operand of dW = Eᵀ·(…)
    add_targets_     dW[y] += Σ over the t with y_t = y of by_target[t]·hidden[t], in their order

HBM for C rows of H: 10, 4 and at most 10 bytes per element of (C, H). A coefficient of 0 gives
exact zeros, whatever the row holds. No atomics: a row of dW belongs to the first program of its id.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from grpo_fast.kernels.gpu.rows import launch, vector

BLOCK_T, BLOCK_H = 128, 1024
# Rows of hidden that `add_targets_` reads at a time for one id.
SEGMENT_ROWS, SEGMENT_H = 8, 256


@triton.jit(do_not_specialize=["n_rows", "n_padded"])
def times_kernel(
    grad_logps_ptr, unit_ptr, target_unit_ptr, by_row_ptr, by_target_ptr, n_rows, n_padded,
    BLOCK_T: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    in_rows = rows < n_rows
    g = tl.load(grad_logps_ptr + rows, mask=in_rows, other=0.0)
    unit = tl.load(unit_ptr + rows, mask=in_rows, other=0.0)
    target_unit = tl.load(target_unit_ptr + rows, mask=in_rows, other=0.0)
    inside = rows < n_padded
    tl.store(by_row_ptr + rows, tl.where(g == 0.0, 0.0, g * unit), mask=inside)
    tl.store(by_target_ptr + rows, tl.where(g == 0.0, 0.0, g * target_unit), mask=inside)


@triton.jit
def write_hidden_kernel(
    product_ptr, by_row_ptr, by_target_ptr, target_ptr, weight_ptr, place_ptr, out_ptr, H,
    stride_product_t, stride_weight_v, stride_weight_h, stride_out_t, BLOCK_H: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    by_row, by_target = tl.load(by_row_ptr + row), tl.load(by_target_ptr + row)
    target = tl.load(target_ptr + row).to(tl.int64)
    read = tl.where(by_target == 0.0, 0, H)
    place = row
    if place_ptr is not None:
        place = tl.load(place_ptr + row).to(tl.int64)
    for start in range(0, H, BLOCK_H):
        cols = start + tl.arange(0, BLOCK_H)
        inside = cols < H
        x = tl.load(product_ptr + row * stride_product_t + cols, mask=inside, other=0.0)
        at = weight_ptr + target * stride_weight_v + cols * stride_weight_h
        w = tl.load(at, mask=cols < read, other=0.0).to(tl.float32)
        total = tl.where(by_row == 0.0, 0.0, x * by_row)
        total += tl.where(by_target == 0.0, 0.0, w * by_target)
        to = out_ptr + place * stride_out_t + cols
        tl.store(to, total.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def scaled_hidden_kernel(
    hidden_ptr, by_row_ptr, out_ptr, H, stride_hidden_t, stride_out_t, BLOCK_H: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    by_row = tl.load(by_row_ptr + row)
    read = tl.where(by_row == 0.0, 0, H)
    for start in range(0, H, BLOCK_H):
        cols = start + tl.arange(0, BLOCK_H)
        h = tl.load(hidden_ptr + row * stride_hidden_t + cols, mask=cols < read, other=0.0)
        scaled = tl.where(by_row == 0.0, 0.0, h.to(tl.float32) * by_row)
        to = out_ptr + row * stride_out_t + cols
        tl.store(to, scaled.to(out_ptr.dtype.element_ty), mask=cols < H)


@triton.jit
def add_targets_kernel(
    id_ptr, end_ptr, order_ptr, by_target_ptr, hidden_ptr, product_ptr, out_ptr, H,
    stride_hidden_t, stride_product_t, stride_out_v, ROWS: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(H, BLOCK_H)
    place = tl.program_id(0) // blocks
    cols = tl.program_id(0) % blocks * BLOCK_H + tl.arange(0, BLOCK_H)
    inside = cols < H
    vocab_row = tl.load(id_ptr + place).to(tl.int64)
    before = tl.load(id_ptr + place - 1, mask=place > 0, other=-1)
    if before != vocab_row:
        to = out_ptr + vocab_row * stride_out_v + cols
        if product_ptr is None:
            total = tl.load(to, mask=inside, other=0.0).to(tl.float32)
        else:
            at = product_ptr + place.to(tl.int64) * stride_product_t + cols
            total = tl.load(at, mask=inside, other=0.0)
        end = tl.load(end_ptr + place).to(tl.int32)
        for first in range(place, end, ROWS):
            places = first + tl.arange(0, ROWS)
            row = tl.load(order_ptr + places, mask=places < end, other=0).to(tl.int64)
            by_target = tl.load(by_target_ptr + row, mask=places < end, other=0.0)
            mask = inside[None, :] & (by_target != 0.0)[:, None]
            h = tl.load(
                hidden_ptr + row[:, None] * stride_hidden_t + cols[None, :], mask=mask, other=0.0
            ).to(tl.float32)
            total += tl.sum(tl.where(mask, h * by_target[:, None], 0.0), 0)
        tl.store(to, total.to(out_ptr.dtype.element_ty), mask=inside)


def times(
    grad_logps: Tensor,  # (C,) fp32
    unit: Tensor,  # (C,) fp32
    target_unit: Tensor,  # (C,) fp32
    rows: int,  # padded C
) -> tuple[Tensor, Tensor]:
    """(by_row, by_target), (padded C,) each: the units times grad_logps, zeros in the padding."""
    by_row, by_target = (
        torch.empty(rows, dtype=torch.float32, device=unit.device) for _ in range(2)
    )
    if rows:
        launch(
            times_kernel, triton.cdiv(rows, BLOCK_T), vector(grad_logps), unit, target_unit,
            by_row, by_target, unit.shape[0], rows, BLOCK_T=BLOCK_T, num_warps=4,
        )  # fmt: skip
    return by_row, by_target


def write_hidden_(
    out: Tensor,  # (C, H), or (N, H) with `places`
    product: Tensor,  # (padded C, H) fp32
    by_row: Tensor,  # (padded C,) fp32
    by_target: Tensor,  # (padded C,) fp32
    target_ids: Tensor,  # (C,)
    weight: Tensor,  # (V, H)
    places: Tensor | None = None,  # (C,) the row of `out`; None: t
) -> Tensor:
    """out[places[t]] = by_row[t]·product[t] + by_target[t]·weight[target_ids[t]]; `out` again."""
    if target_ids.shape[0]:
        launch(
            write_hidden_kernel, target_ids.shape[0], product, by_row, by_target, target_ids,
            weight, places, out, weight.shape[1], product.stride(0), weight.stride(0),
            weight.stride(1), out.stride(0), BLOCK_H=BLOCK_H, num_warps=4,
        )  # fmt: skip
    return out


def scaled_hidden(hidden: Tensor, by_row: Tensor) -> Tensor:
    """(padded C, H) by_row[:, None]·hidden, rounded to the dtype of hidden; contiguous."""
    out = torch.empty(hidden.shape, dtype=hidden.dtype, device=hidden.device)
    if out.shape[0]:
        launch(
            scaled_hidden_kernel, out.shape[0], hidden, by_row, out, out.shape[1],
            hidden.stride(0), out.stride(0), BLOCK_H=BLOCK_H, num_warps=4,
        )  # fmt: skip
    return out


def add_targets_(
    d_weight: Tensor,  # (V, H) fp32, or 16 bits with `products`
    ids: Tensor,  # (C,) the target ids in ascending order
    order: Tensor,  # (C,) the row of each of them, ascending where ids are equal
    by_target: Tensor,  # (C,) fp32
    hidden: Tensor,  # (C, H)
    products: Tensor | None = None,  # (C, H) fp32
) -> None:
    """d_weight[y] += Σ by_target[t]·hidden[t] over the rows t with target y, in their order.

    With `products` the sum starts from products[i], what the GEMM gives for ids[i], instead of from
    what d_weight holds: rounded once.
    """
    if ids.shape[0]:
        ends = torch.searchsorted(ids, ids, right=True)
        blocks = triton.cdiv(hidden.shape[1], SEGMENT_H)
        launch(
            add_targets_kernel, ids.shape[0] * blocks, ids, ends, order, by_target, hidden,
            products, d_weight, hidden.shape[1], hidden.stride(0),
            0 if products is None else products.stride(0), d_weight.stride(0), ROWS=SEGMENT_ROWS,
            BLOCK_H=SEGMENT_H, num_warps=4,
        )  # fmt: skip
