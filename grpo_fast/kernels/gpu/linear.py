"""LM head fused with log-softmax in Triton: the GEMM's epilogue computes softmax statistics.

    raw = hidden · Wᵀ + bias, z = softcap·tanh(logit_scale·raw/softcap)/temperature
    lse = log Σ_j e^z_j,  logp = z_target - lse,  entropy = lse - Σ_j p_j·z_j

The kernel reads `hidden` and W from HBM. It reads W once for every 8 MiB of `hidden`. For each
row, it writes 16·ceil(V/2048) bytes of partial sums, about 0.008 bytes per logit, which a second
kernel reads. On request, it also stores the raw logits, or the exponentials that are defined
below. Passes with and without gradient use the same kernel, so their log-probabilities are
bitwise equal.

One program computes BLOCK_T rows of one slice, which is a range of 2048 vocabulary columns. With e
= exp(z - max), it keeps max, Σe, Σe·(z - max) and z[target] of each row in registers. The sums
exclude the target. A second kernel adds the sums of all slices of a row in order. The slices depend
on V only, and the tile size depends only on the device, the dtype and the layout of W. The result
of a row thus depends on the row, W and the row's scalars, but not on the batch. Accumulation is in
fp32, and fp32 inputs are multiplied in IEEE precision (no TF32).

`head_exponentials` also stores a matrix E of exponentials in 16 bits, for the gradient GEMMs. E is
written once, before the loss is known:

    E_j = exp(z_j - s)·f_j, 0 in the target column,             f = 1 - tanh² (1 without a soft cap)
    d raw_j = g·unit·E_j,               unit = -exp(s - lse)·logit_scale/temperature
    d raw_y = g·target_unit,            target_unit = (1 - p_y)·f_y·logit_scale/temperature

Here y is the target's column, s is a number that is chosen for each row, and g is dL/dlogp. The
factor g·unit scales the rows of dH = E·W and the rows of `hidden` in dW = Eᵀ·hidden, so E is never
modified. In addition to the HBM traffic above, the kernel writes 2 bytes per logit.

The d-logit of the target is the largest of its row, so the target is excluded from E. Its
contribution is added in fp32: each row of dH gets a multiple of one row of W, and one row of dW
gets a multiple of a row of `hidden`. Nothing cancels when p_y is close to 1.

The exact value of s does not matter, because bf16 has the same relative precision everywhere.
However, s must be close to lse, and must be known before the row is computed. The kernel uses s =
z[target], which costs one dot product per row (target_kernel). The distance lse - s is then -logp.
Rows with -logp > MAX_NLL (math.py) and rows with NaN are computed a second time with s = lse. The
host need not know which rows these are, because the second launch covers all rows, and the programs
of all other rows return immediately. All elements of E are finite, even in rows with NaN, so a row
with g = 0 contributes nothing.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from grpo_fast.kernels.gpu.launch import (
    SLICE_COLUMNS,
    architecture,
    ceil_div,
    is_aligned,
    launch,
    outputs,
)
from grpo_fast.kernels.gpu.math import (
    FLOOR,
    capped_logits,
    exceeds_max_nll,
    exp_fp32,
    exponential_coefficients,
    finish,
    fold_tile,
)
from grpo_fast.kernels.gpu.tokens import loss_and_slope, loss_arguments
from grpo_fast.kernels.types import ROW_MULTIPLE, Exponentials, HeadInputs, RowStats, padded, vector
from grpo_fast.objective.coefficients import RowInputs
from grpo_fast.objective.config import LossConfig

# Maximum size of the hidden states that are processed concurrently. Every tile of W reads them
# again, so they must stay in L2 together with the tiles of W in use. On an H100 (50 MB of L2), 8
# MiB are 2 to 4% faster than 24 MiB at H = 2048 and 4096. At H = 896, 8 MiB are 3% slower with
# stored exponentials, and 3% faster without.
GROUP_BYTES = 8 << 20


class LinearConfig(NamedTuple):
    """Block sizes of the kernel that computes logps from hidden states.

    A program computes BLOCK_T rows of one vocabulary slice. A tile of logits has BLOCK_V columns,
    and the GEMM advances by BLOCK_H elements of the hidden size. The epilogue processes a tile in
    pieces of `piece` columns, so that only one piece needs additional registers. The bits of a
    log-probability depend on `piece` and `block_h`, but not on the other fields.

    With `flatten`, the loops over tiles and over the hidden size are one pipelined loop, so that
    the loads of the next tile overlap with the epilogue of the current tile.
    """

    block_t: int
    block_v: int
    block_h: int
    num_warps: int
    num_stages: int
    piece: int
    use_tma: bool = False
    flatten: bool = False


# Block sizes that `linear_config` returns. The key is (architecture or "other", whether inputs have
# 16 bits, whether W is aligned). W is aligned if the size of a row is a multiple of 16 bytes, which
# tensor descriptors (TMA) and vector loads require. FMA units multiply fp32 inputs, in IEEE
# precision. The tile sizes were chosen so that registers do not spill:
#
# - Only sm_90 and gfx942 use a tile of 128 x 128. It would spill on all other architectures. On
#   sm_100, it would spill only with a soft cap and Triton 3.6. But Triton 3.9 cannot compile a tile
#   for sm_100 that is split into pieces and uses 8 warps.
# - Unaligned rows are loaded element by element, and large tiles then spill. In fp32, even a tile
#   of 32 x 64 spills.
# - sm_120 uses pointers instead of TMA, because with TMA, Triton 3.6 uses local memory there.
_LINEAR: dict[tuple[str, bool, bool], LinearConfig] = {
    ("sm_90", True, True): LinearConfig(128, 128, 64, 8, 3, 32, use_tma=True, flatten=True),
    ("sm_100", True, True): LinearConfig(128, 64, 64, 4, 3, 32, use_tma=True),
    ("gfx942", True, True): LinearConfig(128, 128, 64, 8, 2, 32),
    ("other", True, True): LinearConfig(128, 64, 64, 8, 3, 64),
    ("other", True, False): LinearConfig(64, 64, 32, 8, 2, 64),
    ("other", False, True): LinearConfig(64, 64, 16, 8, 3, 64),
    ("other", False, False): LinearConfig(32, 32, 16, 4, 2, 32),
}
# Larger tiles of sm_90, for 16-bit inputs, an aligned W and an epilogue that needs few registers.
# These tiles have twice as many columns, which reduces the L2 traffic from 1/64 to 1/85 byte per
# flop. On Hopper, the L2 traffic limits the speed of a 128 x 128 tile.
#
# - plain: no soft cap, bias or entropy. With any of these, this tile would spill registers in a
#   flattened loop. benchmarks/LOG.md has the times on an H100.
# - light: no soft cap, and no bias together with an entropy; or no exponentials are stored.
_LARGE = {
    "plain": LinearConfig(128, 256, 64, 8, 3, 32, use_tma=True, flatten=True),
    "light": LinearConfig(128, 256, 64, 8, 4, 32, use_tma=True),
}


def linear_config(dtype: torch.dtype, arch: str, *, aligned: bool, epilogue: str) -> LinearConfig:
    """Return the block sizes of the kernel that computes logps from hidden states.

    They do not depend on the batch. `epilogue` is "plain", "light" or "heavy", from few to many
    registers. The results are bitwise equal for all three, because `piece` and `block_h` are.
    """
    key = arch, dtype in (torch.bfloat16, torch.float16), aligned
    if key == ("sm_90", True, True) and epilogue in _LARGE:
        return _LARGE[epilogue]
    return _LINEAR.get(key) or _LINEAR[("other", *key[1:])]


@triton.jit
def load_tile(
    source, row_start, n_rows, stride_row, col_start, n_cols, stride_col,
    ROWS: tl.constexpr, COLS: tl.constexpr, USE_TMA: tl.constexpr,
):  # fmt: skip
    """Load a tile of ROWS x COLS elements. Elements outside the matrix are 0.

    With USE_TMA, `source` is a tensor descriptor. Otherwise it is a pointer, and loads are masked.
    """
    if USE_TMA:
        tile = source.load([row_start, col_start])
    else:
        # Compute the address of the tile's corner in int64, but the offsets inside the tile in
        # int32, because int32 needs half as many registers.
        offs_r, offs_c = tl.arange(0, ROWS), tl.arange(0, COLS)
        corner = (
            source
            + tl.cast(row_start, tl.int64) * stride_row
            + tl.cast(col_start, tl.int64) * stride_col
        )
        inside = (offs_r < n_rows - row_start)[:, None] & (offs_c < n_cols - col_start)[None, :]
        tile = tl.load(
            corner + offs_r[:, None] * stride_row + offs_c[None, :] * stride_col, mask=inside,
            other=0.0,
        )  # fmt: skip
    return tile


@triton.jit(do_not_specialize=["n_rows", "group_blocks"])
def slice_kernel(
    hidden, weight, bias_ptr, target_ptr, out, raw_target_ptr, lse_ptr,
    partial_ptr, n_rows, V, H, stride_hidden_t, stride_weight_v, stride_weight_h, stride_out_t,
    slice_columns, group_blocks, logit_scale, softcap, temperature, STORE: tl.constexpr,
    ONLY_HIGH_NLL: tl.constexpr, ENTROPY: tl.constexpr, USE_TMA: tl.constexpr,
    STORE_TMA: tl.constexpr, BRANCH: tl.constexpr, FLATTEN: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_H: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Compute the partial sums of one slice of the vocabulary for BLOCK_T rows."""
    row_blocks, slices = tl.cdiv(n_rows, BLOCK_T), tl.cdiv(V, slice_columns)
    # 1. Select the rows and the vocabulary slice of this program. Programs with neighbouring ids
    # share a slice of W, so all but the first of them read its tiles from L2. Rows of `hidden` are
    # read again for every tile and should also come from L2. A group of row blocks whose rows fit
    # into L2 therefore processes all slices before the next group starts.
    first_block = tl.program_id(0) // (group_blocks * slices) * group_blocks
    place = tl.program_id(0) % (group_blocks * slices)
    blocks = tl.minimum(row_blocks - first_block, group_blocks)
    slice_id = place // blocks
    row_start = (first_block + place % blocks) * BLOCK_T
    rows = row_start + tl.arange(0, BLOCK_T)
    in_rows = rows < n_rows
    target = tl.load(target_ptr + rows, mask=in_rows, other=-1)
    # Replace invalid ids with -1, which matches no column. Convert the ids to int32, which needs
    # half as many registers as int64.
    target = tl.where((target >= 0) & (target < V), target, -1).to(tl.int32)
    inv_temperature = tl.div_rn(1.0, temperature)

    # 2. Initialise the running sums. If exponentials are stored, choose `normaliser`, the number s
    # that is subtracted from the logits of each row (see the module docstring).
    first = slice_id * slice_columns
    stop = tl.minimum(first + slice_columns, V)
    row_max = tl.full([BLOCK_T], FLOOR, tl.float32)
    exp_sum = tl.zeros([BLOCK_T], tl.float32)
    exp_z_sum = tl.zeros([BLOCK_T], tl.float32)
    z_target = tl.zeros([BLOCK_T], tl.float32)
    normaliser = z_target
    if STORE == "":
        # If no row of the block has a valid target, process no columns.
        stop = tl.where(tl.max(target, 0) >= 0, stop, first)
    if STORE == "exponentials":
        raw_target = tl.load(raw_target_ptr + rows, mask=in_rows, other=0.0)
        # Use s = z[target], which depends only on the target's raw logit.
        normaliser, _ = capped_logits(raw_target, logit_scale, softcap, inv_temperature)
        # In the second pass, the lse is known. Use s = lse in rows whose z[target] is too far below
        # it.
        if lse_ptr is not None:
            lse = tl.load(lse_ptr + rows, mask=in_rows, other=0.0)
            high_nll = exceeds_max_nll(lse, normaliser) & in_rows
            normaliser = tl.where(high_nll, lse, normaliser)
            # If no row of the block needs s = lse, process no columns.
            if ONLY_HIGH_NLL:
                stop = tl.where(tl.max(high_nll.to(tl.int32), 0) > 0, stop, first)

    # 3. For each tile, compute the logits and add them to the running sums.
    for start in tl.range(first, stop, BLOCK_V, flatten=FLATTEN):
        raw = tl.zeros([BLOCK_T, BLOCK_V], tl.float32)
        for h in tl.range(0, H, BLOCK_H):
            a = load_tile(
                hidden, row_start, n_rows, stride_hidden_t, h, H, 1, BLOCK_T, BLOCK_H, USE_TMA
            )
            b = load_tile(
                weight, start, V, stride_weight_v, h, H, stride_weight_h, BLOCK_V, BLOCK_H, USE_TMA
            )
            # "ieee" disables TF32 for fp32 operands. It has no effect on 16-bit operands, whose
            # products are summed in fp32.
            raw = tl.dot(a, b.T, raw, input_precision="ieee")
        row_max, exp_sum, exp_z_sum, z_target = fold_tile(
            raw, start, (row_max, exp_sum, exp_z_sum, z_target),
            (target, normaliser, inv_temperature), (row_start, n_rows, V, stride_out_t),
            out, bias_ptr, logit_scale, softcap,
            STORE, ENTROPY, STORE_TMA, BRANCH, BLOCK_T, BLOCK_V, PARTS,
        )  # fmt: skip

    # 4. Store the partial sums of the slice.
    if partial_ptr is not None:
        # `partial` is (4, S, T) for S slices and T rows. T is the last dimension, so that the
        # values of neighbouring rows are stored contiguously.
        plane = tl.cast(slices, tl.int64) * n_rows
        here = partial_ptr + tl.cast(slice_id, tl.int64) * n_rows + rows
        tl.store(here, row_max, mask=in_rows)
        tl.store(here + plane, exp_sum, mask=in_rows)
        tl.store(here + 2 * plane, z_target, mask=in_rows)
        if ENTROPY:
            tl.store(here + 3 * plane, exp_z_sum, mask=in_rows)


@triton.jit(do_not_specialize=["n_rows", "slices"])
def join_kernel(
    partial_ptr, target_ptr, lse_ptr, logps_ptr, entropy_ptr, n_rows, V, slices, raw_target_ptr,
    logit_scale, softcap, temperature, advantages_ptr, policy_weights_ptr,
    kl_weights_ptr, old_logps_ptr, ref_logps_ptr, losses_ptr, grad_logps_ptr, by_row_ptr,
    by_target_ptr, p0, p1, p2, p3, kl_max, kl_d_max, OBJECTIVE: tl.constexpr,
    N_PARAMS: tl.constexpr, KL: tl.constexpr, KL_TIMES_RATIO: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Add the partial sums of all slices for BLOCK_T rows, BLOCK_S slices at a time.

    If `losses_ptr` is given, also compute a token-level loss, its derivative dL/dlogp and the
    coefficients of the stored exponentials.
    """
    rows = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    in_rows = rows < n_rows
    target = tl.load(target_ptr + rows, mask=in_rows, other=-1)
    # If the target is outside the vocabulary, `finish` must not add its exponential.
    inside = (target >= 0) & (target < V)
    plane = tl.cast(slices, tl.int64) * n_rows
    offs_s = tl.arange(0, BLOCK_S)
    # 1. Add up z[target]. The slice that contains the target stored it, and all others stored 0.
    z_target = tl.zeros([BLOCK_T], tl.float32)
    for first in range(0, slices, BLOCK_S):
        here = partial_ptr + tl.cast(first + offs_s, tl.int64)[:, None] * n_rows + rows[None, :]
        mask = (first + offs_s < slices)[:, None] & in_rows[None, :]
        z_target += tl.sum(tl.load(here + 2 * plane, mask=mask, other=0.0), 0)
    # 2. Rescale the sums of the slices to a common maximum, and add them in a fixed order.
    row_max = tl.maximum(tl.where(inside, z_target, FLOOR), FLOOR)
    exp_sum = tl.zeros([BLOCK_T], tl.float32)
    exp_z_sum = tl.zeros([BLOCK_T], tl.float32)
    for first in range(0, slices, BLOCK_S):
        here = partial_ptr + tl.cast(first + offs_s, tl.int64)[:, None] * n_rows + rows[None, :]
        # Rows and slices outside the mask get the maximum FLOOR and the sum 0, so they contribute
        # nothing.
        mask = (first + offs_s < slices)[:, None] & in_rows[None, :]
        max_s = tl.load(here, mask=mask, other=FLOOR)
        exp_sum_s = tl.load(here + plane, mask=mask, other=0.0)
        new_max = tl.maximum(row_max, tl.max(max_s, 0))
        rescale = exp_fp32(row_max - new_max)
        shifted_s = max_s - new_max[None, :]
        rescale_s = exp_fp32(shifted_s)
        if entropy_ptr is not None:
            exp_z_sum_s = tl.load(here + 3 * plane, mask=mask, other=0.0)
            exp_z_sum = (exp_z_sum + (row_max - new_max) * exp_sum) * rescale + tl.sum(
                (exp_z_sum_s + shifted_s * exp_sum_s) * rescale_s, 0
            )
        exp_sum = exp_sum * rescale + tl.sum(exp_sum_s * rescale_s, 0)
        row_max = new_max
    # 3. Add the target to the sums, and compute the lse, logp and entropy. Without a target, logp
    # and entropy are 0.
    lse, lp, entropy = finish(row_max, exp_sum, exp_z_sum, z_target, inside)
    lp = tl.where(inside, lp, 0.0)
    entropy = tl.where(inside, entropy, 0.0)
    tl.store(lse_ptr + rows, lse, mask=in_rows)
    tl.store(logps_ptr + rows, lp, mask=in_rows)
    if entropy_ptr is not None:
        tl.store(entropy_ptr + rows, entropy, mask=in_rows)
    if losses_ptr is not None:
        # 4. Compute the loss and the coefficients. Padding rows get coefficients of 0.
        loss, g = loss_and_slope(
            lp, rows, in_rows, advantages_ptr, policy_weights_ptr, kl_weights_ptr, old_logps_ptr,
            ref_logps_ptr, p0, p1, p2, p3, kl_max, kl_d_max, OBJECTIVE, N_PARAMS, KL,
            KL_TIMES_RATIO,
        )  # fmt: skip
        tl.store(losses_ptr + rows, loss, mask=in_rows)
        tl.store(grad_logps_ptr + rows, g, mask=in_rows)
        by_row, by_target = exponential_coefficients(
            tl.where(in_rows, g, 0.0), lp, lse, rows, in_rows, raw_target_ptr, logit_scale, softcap,
            temperature,
        )  # fmt: skip
        tl.store(by_row_ptr + rows, by_row)
        tl.store(by_target_ptr + rows, by_target)


# The last arguments of `join_kernel` in a launch without a loss, except the block sizes.
NO_LOSS: dict[str, object] = dict.fromkeys(join_kernel.arg_names[8:-2])


def tiles(p: HeadInputs, matrix: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Return a tensor descriptor (TMA) of a matrix whose tiles have rows x columns elements."""
    assert p.descriptors is not None
    key = id(matrix), rows, columns
    if key not in p.descriptors:
        p.descriptors[key] = TensorDescriptor.from_tensor(matrix, [rows, columns])
    found: TensorDescriptor = p.descriptors[key]
    return found


def prepared(p: HeadInputs) -> HeadInputs:
    """Prepare the inputs of an LM head kernel, and copy `hidden` if its rows are unaligned.

    The tile size determines the order of sums. It depends on the layout of W. It must not depend on
    the layout of `hidden`, because the bits of a row would then depend on the batch.
    """
    hidden = p.hidden if is_aligned(p.hidden) else aligned_copy(p.hidden)
    return HeadInputs(hidden, p.weight, p.bias, p.target_ids.contiguous(), p.transform, {})


def aligned_copy(matrix: Tensor) -> Tensor:
    """Copy a matrix into rows that start at multiples of 16 bytes."""
    columns = matrix.shape[1]
    per_row = ceil_div(columns * matrix.element_size(), 16) * 16 // matrix.element_size()
    shape = (matrix.shape[0], per_row)
    copy = torch.empty(shape, dtype=matrix.dtype, device=matrix.device)[:, :columns]
    return copy.copy_(matrix)


def sweep(
    p: HeadInputs,  # (T, H), (V, H), (V,), (T,)
    partial: Tensor | None,  # (3, S, T) or (4, S, T)
    out: Tensor | None = None,  # (T, V)
    raw_target: Tensor | None = None,  # (T,)
    lse: Tensor | None = None,  # (T,)
    *,
    only_high_nll: bool = False,
) -> None:
    """Launch `slice_kernel` for all rows and slices.

    The module docstring defines the number s of a row.

    Args:
        p: the result of `prepared`.
        partial: (3, S, T), or (4, S, T) with the entropy. Receives the sums of all S slices. None:
            the sums are not stored.
        out: (T, V). Receives raw logits, or exponentials if `raw_target` is given.
        raw_target: (T,) raw logits of the targets, from which the kernel computes s.
        lse: (T,) lse of each row. In rows with -logp > MAX_NLL, the kernel uses it as s.
        only_high_nll: compute only the row blocks that contain a row with -logp > MAX_NLL.
    """
    # 1. Choose the tile size. It must not depend on the batch, because it changes the order of
    # sums.
    rows, vocab = p.hidden.shape[0], p.weight.shape[0]
    has_entropy = partial is not None and partial.shape[0] == 4
    has_bias = p.bias is not None
    has_softcap = p.transform.softcap is not None
    is_plain = not (has_softcap or has_bias or has_entropy)
    is_light = raw_target is None or not (has_softcap or (has_bias and has_entropy))
    config = linear_config(
        p.hidden.dtype, architecture(p.hidden.device), aligned=is_aligned(p.weight),
        epilogue="plain" if is_plain else "light" if is_light else "heavy",
    )  # fmt: skip
    # 2. Decide how results are stored, and whether the epilogue has a short code path.
    store_tma = config.use_tma and raw_target is not None and out is not None and is_aligned(out)
    # The short code path of the epilogue needs additional registers. Use it only with 16-bit
    # operands, and without a soft cap, bias or entropy. Also do not use it if no partial sums are
    # stored, because registers would then spill on sm_100 with Triton 3.6.
    has_room = is_plain and p.hidden.dtype.itemsize == 2 and partial is not None
    # 3. Compute the number of row blocks whose hidden states fit into GROUP_BYTES of L2. A group of
    # this size processes all slices of W before the next group starts.
    group_blocks = max(
        GROUP_BYTES // (config.block_t * p.hidden.shape[1] * p.hidden.element_size()), 1
    )
    hidden, weight, destination = p.hidden, p.weight, out
    # With TMA, pass tensor descriptors instead of pointers.
    if config.use_tma:
        hidden = tiles(p, hidden, config.block_t, config.block_h)
        weight = tiles(p, weight, config.block_v, config.block_h)
    if store_tma and out is not None:
        destination = tiles(p, out, config.block_t, config.piece)
    launch(
        slice_kernel, ceil_div(rows, config.block_t) * ceil_div(vocab, SLICE_COLUMNS),
        hidden, weight, p.bias, p.target_ids, destination,
        raw_target, lse, partial, rows, vocab, p.hidden.shape[1], p.hidden.stride(0),
        p.weight.stride(0), p.weight.stride(1), 0 if out is None else out.stride(0), SLICE_COLUMNS,
        group_blocks, *p.transform,
        STORE="" if out is None else "logits" if raw_target is None else "exponentials",
        ONLY_HIGH_NLL=only_high_nll, ENTROPY=has_entropy, USE_TMA=config.use_tma,
        STORE_TMA=store_tma, BRANCH=has_room, FLATTEN=config.flatten, BLOCK_T=config.block_t,
        BLOCK_V=config.block_v, BLOCK_H=config.block_h,
        PARTS=config.block_v // config.piece, num_warps=config.num_warps,
        num_stages=config.num_stages,
    )  # fmt: skip


def statistics(
    p: HeadInputs,  # (T, H), (V, H), (V,), (T,)
    *,
    return_entropy: bool,
    out: Tensor | None = None,
    raw_target: Tensor | None = None,
    loss: tuple[RowInputs, LossConfig] | None = None,
) -> tuple[RowStats, tuple[Tensor, ...] | None]:
    """Compute the lse, logp and entropy of every row, (T,) fp32 each.

    `out` and `raw_target` are passed to `sweep`. With `loss`, also compute a token-level loss. Its
    results are listed in `Exponentials`.
    """
    rows, stats = p.hidden.shape[0], outputs(p.hidden, return_entropy)
    found = None
    more: tuple[object, ...] = ()
    constants: dict[str, object] = NO_LOSS
    if loss is not None:
        terms, config = loss
        sizes = (rows, rows, padded(rows), padded(rows))
        found = tuple(torch.empty(x, dtype=torch.float32, device=p.hidden.device) for x in sizes)
        numbers, constants = loss_arguments(config)
        inputs = [vector(x) for x in terms[:5]]
        more = raw_target, *p.transform, *inputs, *found, *numbers
    if rows:
        slices = ceil_div(p.weight.shape[0], SLICE_COLUMNS)
        sums = (4 if return_entropy else 3, slices, rows)
        partial = torch.empty(sums, dtype=torch.float32, device=p.hidden.device)
        sweep(p, partial, out, raw_target)
        # A program writes the coefficients of ROW_MULTIPLE rows, so that padding rows get zeros.
        launch(
            join_kernel, ceil_div(rows, ROW_MULTIPLE), partial, p.target_ids, *stats, rows,
            p.weight.shape[0], slices, *more, **constants, BLOCK_T=ROW_MULTIPLE, BLOCK_S=32,
            num_warps=4,
        )  # fmt: skip
    return stats, found


def head_logps(
    p: HeadInputs, *, return_entropy: bool, logits_out: Tensor | None = None
) -> RowStats:
    """Compute lse, logps and entropies from hidden states in Triton, like `cpu/rows.head_logps`.

    Logits stay in registers unless `logits_out` is given. The last dimension of `logits_out` must
    be contiguous. If a target id is outside [0, V), logp and entropy of its row are 0. If all
    target ids of a block of rows are outside and no logits are stored, their lse is undefined.
    """
    return statistics(prepared(p), return_entropy=return_entropy, out=logits_out)[0]


# ------------------------------------------------------------------------------------- Exponentials
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
    loss: tuple[RowInputs, LossConfig] | None = None,
) -> Exponentials:
    """Compute statistics and write exponentials in bf16, like `cpu/rows.head_exponentials`.

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
