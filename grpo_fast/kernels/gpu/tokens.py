"""Triton kernel that finds the completion of each token, and copies the inputs of the loss.

One launch replaces a binary search, the expansion of advantages from completions to tokens, and one
copy per input. It writes 8 bytes per token for the completion, and 4 bytes per token and input.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from grpo_fast.kernels.gpu.launch import ceil_div, launch

BLOCK = 512
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
