"""LM head restricted to token sets, in Triton, with the interface of kernels/support.py.

    raw_j = hidden·W[id_j] + bias[id_j] for the k ids of a row
    z = transform(raw) -> lse, logp, entropy

The same pass computes the slope, the derivative of logp with respect to hidden. It uses the
algorithm of flash attention, with the rows of W as keys and values:

    slope = d lp / d hidden = ((1 - p_y)·f_y·W[y] - Σ_{j ≠ y} p_j·f_j·W[id_j])·scale/temperature

Here y is the target's position in the set, and f is 1 - tanh², or 1 without a soft cap. The
backward pass computes dH[t] = g[t]·slope[t], with g = dL/dlogp, without reading W again. If the
entropy has a gradient, `sums_kernel` reads the weight rows a second time to compute dH from the
gradient d of the logits, as Σ d_j·W[id_j]. The same kernel computes dW from the pairs (id, row),
sorted by id. Each program writes a part of one row of dW, including the zeros of ids that occur in
no set.

Let nnz be the number of ids in the sets of all R rows. The HBM traffic is nnz·H elements of W,
2·R·H fp32 elements of slopes (written and read), nnz·H elements of `hidden` and V·H elements of dW.
The additional memory is O(nnz) plus the slopes. Sums are computed in fp32, in a fixed order and
without atomics, so every run is bitwise reproducible. The results of a row depend only on the row,
W and the row's scalars.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from grpo_fast.kernels import support
from grpo_fast.kernels.gpu.launch import ceil_div, is_aligned, launch, outputs
from grpo_fast.kernels.gpu.math import FLOOR, capped_logits, exp_fp32, expm1, finish
from grpo_fast.kernels.types import HeadInputs, HeadRows, SupportRows

# Maximum hidden size of the token-set kernel. One row of `hidden` and one row of slopes must fit
# into the registers of 16 warps.
SUPPORT_COLUMNS = 8192
# Number of columns per program of the kernel that sums listed rows. Several programs share one row
# of dW. A common token, such as a line break, may occur in every set, and one program would take
# too long for its row.
SUMS_COLUMNS = 1024


def support_config(width: int, dtype: torch.dtype, *, aligned: bool) -> tuple[int, int, int]:
    """Return BLOCK_K, BLOCK_H and the number of warps of `support_head_kernel`.

    One program processes one row of hidden states, and reads BLOCK_K rows of W at a time. `width`
    is the hidden size. Each thread loads 128 bytes of W at a time, so that two programs keep about
    64 KiB of loads in flight on a multiprocessor. If W is unaligned, every element needs a separate
    address, and a thread loads only a quarter as much.
    """
    # Round H up, because the size of a Triton block must be a power of two.
    block_h = max(1 << (width - 1).bit_length(), 128)
    num_warps = min(max(block_h // 512, 4), 16)
    numbers = 32 * num_warps * (128 // dtype.itemsize if aligned else 16)
    return min(max(numbers // block_h, 1), 32), block_h, num_warps


@triton.jit
def load_columns(start, cols, H, stride):
    """Load columns of one row as fp32. Columns at or beyond H are 0."""
    return tl.load(start + cols.to(tl.int64) * stride, mask=cols < H, other=0.0).to(tl.float32)


@triton.jit
def load_rows(starts, inside, cols, H, stride, POLICY: tl.constexpr):
    """Load columns of the rows that begin at the addresses `starts`, as fp32.

    Elements are 0 in rows where `inside` is False, and in columns at or beyond H.
    """
    mask = inside[:, None] & (cols < H)[None, :]
    at = starts[:, None] + (cols.to(tl.int64) * stride)[None, :]
    return tl.load(at, mask=mask, other=0.0, eviction_policy=POLICY).to(tl.float32)


@triton.jit
def support_head_kernel(
    hidden_ptr, index_ptr, weight_ptr, bias_ptr, id_ptr, offset_ptr, place_ptr, raw_ptr, lse_ptr,
    logps_ptr, entropy_ptr, slope_ptr, H, stride_hidden_t, stride_hidden_h, stride_weight_v,
    stride_weight_h, logit_scale, softcap, temperature, BLOCK_K: tl.constexpr,
    BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Compute the logits, the statistics and the slope of one row.

    BLOCK_H must be at least H, because one program keeps all columns of the row.
    """
    # 1. Find the token set of this row, and the row of `hidden` that predicts its target.
    row = tl.program_id(0).to(tl.int64)
    # Keep the start of the set in int64, but positions inside the set in int32, which need fewer
    # registers.
    first = tl.load(offset_ptr + row)
    count = (tl.load(offset_ptr + row + 1) - first).to(tl.int32)
    place = tl.load(place_ptr + row).to(tl.int32)
    source = row
    if index_ptr is not None:
        source = tl.load(index_ptr + row)
    inv_temperature = tl.div_rn(1.0, temperature)
    # 2. Initialise the online softmax. `others` accumulates Σ e_j·f_j·W[id_j] over all ids except
    # the target.
    row_max = tl.full([], FLOOR, tl.float32)
    exp_sum = tl.zeros([], tl.float32)
    exp_z_sum = tl.zeros([], tl.float32)
    z_target = tl.zeros([], tl.float32)
    f_target = tl.zeros([], tl.float32)
    others = tl.zeros([BLOCK_H], tl.float32)
    cols = tl.arange(0, BLOCK_H)
    h = load_columns(hidden_ptr + source * stride_hidden_t, cols, H, stride_hidden_h)
    # 3. For BLOCK_K ids at a time, compute the logits, update the softmax sums, and add the weight
    # rows to `others`. Step 6 computes the slope from `others`.
    for start in range(0, count, BLOCK_K):
        at = start + tl.arange(0, BLOCK_K)
        inside = at < count
        ids = tl.load(id_ptr + first + at, mask=inside, other=0).to(tl.int64)
        at_weight = weight_ptr + ids * stride_weight_v
        w = load_rows(at_weight, inside, cols, H, stride_weight_h, "evict_last")
        raw = tl.sum(w * h[None, :], 1)
        if bias_ptr is not None:
            raw += tl.load(bias_ptr + ids, mask=inside, other=0.0).to(tl.float32)
        tl.store(raw_ptr + first + at, raw, mask=inside)
        z, f = capped_logits(raw, logit_scale, softcap, inv_temperature)
        is_target = at == place
        z_target += tl.sum(tl.where(is_target, z, 0.0), 0)
        if softcap is not None:
            f_target += tl.sum(tl.where(is_target, f, 0.0), 0)
        z = tl.where(inside & ~is_target, z, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(z, 0))
        rescale = exp_fp32(row_max - new_max)
        shifted = z - new_max
        e = exp_fp32(shifted)
        if entropy_ptr is not None:
            # Accumulate Σ e·(z - max). Computing the entropy from Σ e·z would subtract two numbers
            # as large as the logits, and lose digits.
            exp_z_sum = (exp_z_sum + (row_max - new_max) * exp_sum) * rescale + tl.sum(
                e * tl.maximum(shifted, FLOOR), 0
            )
        exp_sum = exp_sum * rescale + tl.sum(e, 0)
        if slope_ptr is not None:
            e *= f  # the constant 1 without a soft cap
            # Load the tile of W again, which hits L1. If it stayed in registers, a second program
            # would not fit on the multiprocessor.
            w = load_rows(at_weight, inside, cols, H, stride_weight_h, "evict_first")
            others = others * rescale + tl.sum(e[:, None] * w, 0)
        row_max = new_max
    # 4. Include the target in the maximum, and rescale the sums to the new maximum.
    new_max = tl.maximum(row_max, z_target)
    rescale = exp_fp32(row_max - new_max)
    exp_z_sum = (exp_z_sum + (row_max - new_max) * exp_sum) * rescale
    # 5. Compute the statistics of the row.
    lse, lp, entropy = finish(new_max, exp_sum * rescale, exp_z_sum, z_target, True)
    tl.store(lse_ptr + row, lse)
    tl.store(logps_ptr + row, lp)
    if entropy_ptr is not None:
        tl.store(entropy_ptr + row, entropy)
    if slope_ptr is not None:
        # 6. Compute the slope from the weight row of the target and from `others`.
        at_target = weight_ptr + tl.load(id_ptr + first + place).to(tl.int64) * stride_weight_v
        by_target = -expm1(lp)
        if softcap is not None:
            by_target *= f_target
        # `others` excludes the target, so nothing cancels when p_y is close to 1.
        d = by_target * load_columns(at_target, cols, H, stride_weight_h)
        d -= exp_fp32(row_max - lse) * others
        d *= logit_scale * inv_temperature
        tl.store(slope_ptr + row * H + cols, d, mask=cols < H)


@triton.jit
def sums_kernel(
    factor_ptr, index_ptr, offset_ptr, matrix_ptr, out_ptr, H, stride_matrix_t,
    stride_matrix_h, stride_out_t, ADD: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Compute out[s] = Σ factor[i]·matrix[index[i]] over segment s, for BLOCK_H columns.

    With ADD, the sum is added to out[s]. Terms with factor 0 are not loaded, so NaN in their rows
    of the matrix has no effect.
    """
    parts = tl.cdiv(H, BLOCK_H)
    segment = (tl.program_id(0) // parts).to(tl.int64)
    cols = tl.program_id(0) % parts * BLOCK_H + tl.arange(0, BLOCK_H)
    inside = cols < H
    first = tl.load(offset_ptr + segment)
    # The count is 0 for an id that occurs in no set. The loop is then skipped, and zeros are
    # written.
    count = (tl.load(offset_ptr + segment + 1) - first).to(tl.int32)
    total = tl.zeros([BLOCK_H], tl.float32)
    for start in range(0, count, BLOCK_R):
        at = start + tl.arange(0, BLOCK_R)
        factor = tl.load(factor_ptr + first + at, mask=at < count, other=0.0)
        row = tl.load(index_ptr + first + at, mask=at < count, other=0).to(tl.int64)
        x = load_rows(
            matrix_ptr + row * stride_matrix_t, factor != 0.0, cols, H, stride_matrix_h, ""
        )
        total += tl.sum(x * factor[:, None], 0)
    to = out_ptr + segment * stride_out_t + cols
    if ADD:
        total += tl.load(to, mask=inside, other=0.0).to(tl.float32)
    tl.store(to, total.to(out_ptr.dtype.element_ty), mask=inside)


def head_rows(
    p: HeadInputs, rows: SupportRows, *, return_entropy: bool, return_slopes: bool
) -> HeadRows:
    """Compute fp32 logits and statistics over token sets, like `support.head_rows`.

    The other results are bitwise identical with and without slopes.
    """
    hidden, weight = p.hidden, p.weight
    count, width = len(rows.places), weight.shape[1]
    # Use the reference if H is too large, because the kernel keeps a full row of `hidden` in
    # registers.
    if width > SUPPORT_COLUMNS:
        return support.head_rows(
            p, rows, return_entropy=return_entropy, return_slopes=return_slopes
        )
    block_k, block_h, warps = support_config(width, weight.dtype, aligned=is_aligned(weight))
    new = functools.partial(torch.empty, dtype=torch.float32, device=weight.device)
    stats, raw = outputs(rows.places, return_entropy), new(len(rows.ids))
    slopes = new((count, width)) if return_slopes else None
    launch(
        support_head_kernel, count, hidden, rows.hidden_index, weight, p.bias, rows.ids,
        rows.offsets, p.target_ids, raw, *stats, slopes, width, hidden.stride(0), hidden.stride(1),
        weight.stride(0), weight.stride(1), *p.transform, BLOCK_K=block_k,
        BLOCK_H=block_h, num_warps=warps,
    )  # fmt: skip
    return HeadRows(raw, stats, slopes)


def head_hidden(d: Tensor, weight: Tensor, rows: SupportRows) -> Tensor:  # (R, H) fp32
    """Compute dH from d-logits over token sets, like `support.head_hidden`."""
    shape = len(rows.places), weight.shape[1]
    out = torch.empty(shape, dtype=torch.float32, device=d.device)
    _sums(d, rows.ids, rows.offsets, weight, out, add=False)
    return out


def head_weight(d: Tensor, hidden: Tensor, rows: SupportRows, out: Tensor, *, add: bool) -> None:
    """Compute dW from d-logits over token sets, like `support.head_weight`.

    Each element of `out` is written once.
    """
    # Sort stably, so that the rows of an id stay in order. Every run then gives bitwise identical
    # results.
    ids, order = rows.ids.sort(stable=True)
    # For each id, find the range of its terms in the sorted list by binary search. The range is a
    # segment for `sums_kernel`, which writes the sum of its terms to the id's row of dW.
    ends = torch.arange(out.shape[0] + 1, device=ids.device)
    _sums(d[order], rows.hidden_rows[order], torch.searchsorted(ids, ends), hidden, out, add=add)


def _sums(
    factors: Tensor, index: Tensor, offsets: Tensor, matrix: Tensor, out: Tensor, *, add: bool
) -> None:
    """Write out[s] = Σ_i factors[i]·matrix[index[i]] for each segment s with `sums_kernel`.

    Args:
        factors: (nnz,) fp32 weights of the terms.
        index: (nnz,) int64 row of `matrix` for each term.
        offsets: (S+1,) int64 bounds of the segments. The terms of segment s are those from
            offsets[s] to offsets[s + 1] - 1.
        matrix: (N, H).
        out: (S, H), rows contiguous.
        add: add to `out` instead of overwriting it.
    """
    width = out.shape[1]
    launch(
        sums_kernel, out.shape[0] * ceil_div(width, SUMS_COLUMNS), factors, index, offsets,
        matrix, out, width, matrix.stride(0), matrix.stride(1), out.stride(0), ADD=add,
        BLOCK_R=8 if is_aligned(matrix) else 4, BLOCK_H=SUMS_COLUMNS, num_warps=4,
    )  # fmt: skip
