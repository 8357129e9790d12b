"""Candidate for `grad_filter` on a GPU: dH and dW computed from the live tiles of E only.

E is the matrix of exponentials that the forward GEMM stores (exponentials.py). A tile is a part of
E with 128 rows and 64 columns. A tile is live if the gradient GEMMs multiply it. The epilogue of
the forward GEMM also writes the log of each row's sum over each tile, which adds 1/32 of E's bytes.
The mass of a tile is the sum Σ|d_tj| of its gradients with respect to the logits. Once the loss is
known, the tiles with the smallest masses are dropped, as long as the dropped mass is at most the
fraction `tolerance` of the total mass. The error has the same bounds as in grad_filter.py. Tile
sums cost as much as tile maxima, and they give the dropped mass exactly.

    dH    product[r] = Σ E[r, c]·W[c] over the live tiles (r, c) of a block of rows, in fp32
    dW    dW[c] = Σ E[r, c]ᵀ·scaled[r] over the live tiles (r, c) of a block of columns

There is no GPU sync, because the lists of live tiles have room for all tiles. The kernels of
gpu/gradients.py add the contributions of the targets. Soft cap, bias and entropy are not supported.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from benchmarks.gpu.loops import rewritten
from benchmarks.gpu.patch import patched
from grpo_fast.kernels.gpu import exponentials, linear
from grpo_fast.kernels.gpu.configs import architecture
from grpo_fast.kernels.gpu.epilogue import fold_tile, halves
from grpo_fast.kernels.gpu.launch import HeadInputs, is_aligned, launch
from grpo_fast.kernels.gpu.linear import load_tile
from grpo_fast.kernels.gpu.math import FLOOR, exp_fp32
from grpo_fast.kernels.types import Exponentials, LogitTransform, RowStats

ROWS, COLUMNS = 128, 64
TILE_COLUMNS = tl.constexpr(COLUMNS)


# For each architecture: columns of dH and dW, warps, stages, and whether to use TMA. The values
# were chosen by register use and spills. They have not been timed.
BLOCKS = {"sm_90": (256, 8, 4, True), "sm_100": (128, 8, 3, True), "gfx942": (128, 8, 2, False)}
OTHER = (64, 8, 3, False)


class LiveTiles(NamedTuple):
    """The selected tiles, and the masses of the dropped tiles.

    Attributes:
        is_live: (row blocks, column blocks) bool, True for tiles that are multiplied.
        dropped: 0-d fp64, sum of the masses of the dropped tiles.
        total: 0-d fp64, sum of all masses, including the target columns.
    """

    is_live: Tensor
    dropped: Tensor
    total: Tensor


@triton.jit
def fold_and_weigh(
    log_sum_ptr, in_rows, raw, start, sums, row, matrix, out, bias_ptr, logit_scale, softcap,
    STORE: tl.constexpr, ENTROPY: tl.constexpr, STORE_TMA: tl.constexpr, BRANCH: tl.constexpr,
    BLOCK_T: tl.constexpr, COLS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Fold a block of logits into the running sums and store log Σ e^z of each tile.

    The block is halved until it has TILE_COLUMNS columns. `fold_tile` then sums the tile, and the
    result is added to the running sums.
    """
    if COLS > TILE_COLUMNS:
        left, right = halves(raw, BLOCK_T, COLS)
        sums = fold_and_weigh(
            log_sum_ptr, in_rows, left, start, sums, row, matrix, out, bias_ptr, logit_scale,
            softcap, STORE, ENTROPY, STORE_TMA, BRANCH, BLOCK_T, COLS // 2, PARTS // 2,
        )  # fmt: skip
        sums = fold_and_weigh(
            log_sum_ptr, in_rows, right, start + COLS // 2, sums, row, matrix, out, bias_ptr,
            logit_scale, softcap, STORE, ENTROPY, STORE_TMA, BRANCH, BLOCK_T, COLS // 2, PARTS // 2,
        )  # fmt: skip
    else:
        high, rest, moment, z_target = sums
        _, n_rows, V, _ = matrix
        fresh = tl.full([BLOCK_T], FLOOR, tl.float32), tl.zeros([BLOCK_T], tl.float32)
        tile_high, tile_rest, moment, z_target = fold_tile(
            raw, start, (fresh[0], fresh[1], moment, z_target), row, matrix, out, bias_ptr,
            logit_scale, softcap, STORE, ENTROPY, STORE_TMA, BRANCH, BLOCK_T, COLS, PARTS,
        )  # fmt: skip
        if start < V:
            here = log_sum_ptr + tl.cast(start // TILE_COLUMNS, tl.int64) * n_rows
            tl.store(here, tile_high + tl.log(tile_rest), mask=in_rows)
        raised = tl.maximum(high, tile_high)
        rest = rest * exp_fp32(high - raised) + tile_rest * exp_fp32(tile_high - raised)
        sums = raised, rest, moment, z_target
    return sums


# Old and new text in the kernel's source. The buffer of partial sums contains the sums of the
# slices, (3, S, T), followed by the sums of the tiles, (tiles, T).
WEIGHED = (
    "fold_tile(",
    "fold_and_weigh(partial_ptr + tl.cast(3 * slices, tl.int64) * n_rows + rows, in_rows,",
)


def weighed_exponentials(
    hidden: Tensor,  # (T, H) 16 bits
    weight: Tensor,  # (V, H)
    target_ids: Tensor,  # (T,)
    rule: LogitTransform,
    out: Tensor,  # (T, V)
) -> tuple[Exponentials, Tensor]:
    """Run `head_exponentials` and also return the sums of the tiles.

    Returns:
        The result of `head_exponentials`, and (tiles, T) fp32: log Σ e^z of each row over the
        columns of each tile, without the target column.

    Raises:
        ValueError: the logit transform has a soft cap.
    """
    if rule.softcap is not None:
        raise ValueError(f"rule.softcap: expected None, got {rule.softcap}")
    found: list[Tensor] = []

    def statistics(
        p: HeadInputs, *, return_entropy: bool, out: Tensor, raw_target: Tensor
    ) -> RowStats:
        rows, slices = p.hidden.shape[0], linear.slice_count(p)
        tiles = triton.cdiv(p.weight.shape[0], COLUMNS)
        sums = torch.empty((3 * slices + tiles) * rows, device=out.device)
        partial = sums[: 3 * slices * rows].view(3, slices, rows)
        lse, logps = torch.empty(2, rows, device=out.device)
        kernel = rewritten((WEIGHED,), fold_and_weigh=fold_and_weigh)
        with patched(linear, slice_kernel=kernel):
            linear.sweep(p, partial, out, raw_target)
        linear.join(p, partial, (lse, logps, None))
        found.append(sums[3 * slices * rows :].view(tiles, rows))
        return lse, logps, None

    with patched(exponentials, statistics=statistics):
        result = exponentials.head_exponentials(hidden, weight, None, target_ids, rule, out)
    return result, found[0]


def live_tiles(
    log_sums: Tensor,  # (tiles, T) fp32
    lse: Tensor,  # (T,) fp32
    slopes: Tensor,  # (T,) fp32: dL/dlogp·logit_scale/temperature
    by_target: Tensor,  # (T,) fp32
    tolerance: float,
) -> LiveTiles:
    """Drop the tiles with the smallest masses, up to `tolerance` of the total mass.

    If a mass is NaN, no tile is dropped, so that the NaN reaches the gradients.
    """
    by_row = (log_sums - lse).exp_().mul_(slopes.abs())
    by_row.masked_fill_(slopes == 0, 0.0)  # a row without gradient may contain NaN
    padded = torch.nn.functional.pad(by_row, (0, -by_row.shape[1] % ROWS))
    masses = padded.unflatten(1, (-1, ROWS)).sum(2).double().t().contiguous()
    lightest, order = masses.flatten().sort()
    summed = lightest.cumsum(0)
    is_live = torch.empty_like(masses, dtype=torch.bool)
    is_live.view(-1)[order] = ~(summed <= tolerance * summed[-1])
    dropped = torch.where(is_live, 0.0, masses).sum()
    return LiveTiles(is_live, dropped, summed[-1] + by_target.abs().sum(dtype=torch.float64))


@triton.jit(do_not_specialize=["n_rows"])
def live_product_kernel(
    matrix, other, out_ptr, count_ptr, list_ptr, n_rows, V, H, stride_matrix_t, stride_other,
    stride_out, most, TRANSPOSED: tl.constexpr, USE_TMA: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_K: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK_M rows of matrix·other or matrixᵀ·other over the live tiles of these rows."""
    blocks = tl.cdiv(H, BLOCK_H)
    block, column = tl.program_id(0) // blocks, tl.program_id(0) % blocks * BLOCK_H
    first = block * BLOCK_M
    total = tl.zeros([BLOCK_M, BLOCK_H], tl.float32)
    listed = list_ptr + tl.cast(block, tl.int64) * most
    if TRANSPOSED:
        length, depth = V, n_rows
    else:
        length, depth = n_rows, V
    steps = tl.load(count_ptr + block) * STEPS
    tile = tl.load(listed)
    for step in tl.range(0, steps):
        k = (tile * STEPS + step % STEPS) * BLOCK_K
        # Load the index of the next tile now. Otherwise, the address of a tile would depend on a
        # load in the same step, and the pipeline would prefetch half as far ahead.
        tile = tl.load(listed + (step + 1) // STEPS, mask=step + 1 < steps, other=0)
        if TRANSPOSED:
            a = load_tile(
                matrix, k, n_rows, stride_matrix_t, first, V, 1, BLOCK_K, BLOCK_M, USE_TMA
            ).T
        else:
            a = load_tile(
                matrix, first, n_rows, stride_matrix_t, k, V, 1, BLOCK_M, BLOCK_K, USE_TMA
            )
        b = load_tile(other, k, depth, stride_other, column, H, 1, BLOCK_K, BLOCK_H, USE_TMA)
        total = tl.dot(a, b, total)
    rows, cols = first + tl.arange(0, BLOCK_M), column + tl.arange(0, BLOCK_H)
    to = out_ptr + rows.to(tl.int64)[:, None] * stride_out + cols[None, :]
    inside = (rows < length)[:, None] & (cols < H)[None, :]
    tl.store(to, total.to(out_ptr.dtype.element_ty), mask=inside)


def live_product(
    matrix: Tensor,  # (T, V) 16 bits
    other: Tensor,  # (V, H); transposed (T, H)
    live: LiveTiles,
    out: Tensor,  # (T, H); transposed (V, H)
    *,
    transposed: bool = False,
) -> Tensor:
    """Write matrix·other or matrixᵀ·other over the live tiles to `out`, and return `out`.

    Rows of `out` without a live tile are set to 0. The rows of all tensors must be contiguous.
    """
    (rows, vocab), width = matrix.shape, other.shape[1]
    is_live = live.is_live.t().contiguous() if transposed else live.is_live
    counts = is_live.sum(1, dtype=torch.int32)
    order = (~is_live).to(torch.uint8).sort(dim=1, stable=True).indices.to(torch.int32)
    aligned = is_aligned(matrix) and is_aligned(other)
    config = BLOCKS.get(architecture(matrix.device), OTHER) if aligned else OTHER
    block_h, num_warps, num_stages, use_tma = config
    block_m, steps = (COLUMNS, ROWS // 64) if transposed else (ROWS, COLUMNS // 64)
    operands: tuple[Any, ...] = matrix, other
    if use_tma:
        box = (64, block_m) if transposed else (block_m, 64)
        operands = linear.tiles(matrix, *box), linear.tiles(other, 64, block_h)
    launch(
        live_product_kernel, triton.cdiv(out.shape[0], block_m) * triton.cdiv(width, block_h),
        *operands, out, counts, order, rows, vocab, width, matrix.stride(0), other.stride(0),
        out.stride(0), order.stride(0), TRANSPOSED=transposed, USE_TMA=use_tma, BLOCK_M=block_m,
        BLOCK_H=block_h, BLOCK_K=64, STEPS=steps, num_warps=num_warps,
        num_stages=num_stages,
    )  # fmt: skip
    return out
