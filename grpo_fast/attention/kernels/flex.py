"""torch's flex_attention for packed rows: CUDA without a FlashAttention that fits.

The mask of blocks comes from the layout on the host: `create_block_mask` evaluates T² entries.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from grpo_fast.attention.layout import TreeLayout
from grpo_fast.attention.spans import Rule

BLOCK = 128


def attend(q: Tensor, k: Tensor, v: Tensor, layout: TreeLayout, rule: Rule) -> Tensor:
    """(T, H, D), (T, H_kv, D) twice → (T, H, D); differentiable."""
    q4, k4, v4 = (x.transpose(0, 1)[None] for x in (q, k, v))
    mask = layout.cached(("flex", rule.window), lambda: _block_mask(layout, rule.window))
    # Without a compiler flex_attention stores all T² scores, which a CPU test may.
    out = _function(q.is_cuda)(
        q4, k4, v4, score_mod=_score_mod(rule.softcap), block_mask=mask, scale=rule.scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )  # fmt: skip
    return out[0].transpose(0, 1)


@cache
def _function(is_compiled: bool) -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=True) if is_compiled else flex_attention


@cache
def _score_mod(softcap: float | None) -> Any:
    def cap(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    return None if softcap is None else cap


def _block_mask(layout: TreeLayout, window: int | None) -> Any:
    """Which blocks of keys hold a visible key, which need no mask, and the mask itself."""
    from torch.nn.attention.flex_attention import BlockMask

    related, segment, position = layout.related, layout.segments, layout.position_ids[0]

    def mask_mod(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        distance = position[query] - position[key]
        seen = related[segment[query], segment[key]]
        return seen & (distance >= 0) & (distance < (window or layout.total + 1))

    some, full = block_map(layout, window)
    partial_blocks, full_blocks = (_indices(x, position.device) for x in (some & ~full, full))
    return BlockMask.from_kv_blocks(
        *partial_blocks, *full_blocks, BLOCK_SIZE=BLOCK, mask_mod=mask_mod,
        seq_lengths=(layout.total, layout.total),
    )  # fmt: skip


def _indices(blocks: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """(Q, K) bool → int32: (1, 1, Q) counts, (1, 1, Q, K) indices of the blocks, these first."""
    order = blocks.int().argsort(dim=-1, descending=True, stable=True).int()
    count = blocks.sum(-1, dtype=torch.int32)
    return count[None, None].to(device), order[None, None].to(device)


def block_map(layout: TreeLayout, window: int | None) -> tuple[Tensor, Tensor]:
    """(Q, K) bool on the host, twice: blocks where some query sees some key; where all see all."""
    number = -(-layout.total // BLOCK)
    some, full = (torch.zeros(number, number, dtype=torch.bool) for _ in range(2))
    starts, before, reach = layout.starts, layout.prefixes, window or layout.total + 1
    for segment in range(len(layout.lengths)):
        first, end = starts[segment], starts[segment + 1]
        for block in range(first // BLOCK, -(-end // BLOCK)):
            top, bottom = max(first, block * BLOCK), min(end, (block + 1) * BLOCK)
            marks, alone = (some[block], full[block]), bottom - top == BLOCK
            own = max(first, top - reach + 1), bottom, max(first, bottom - reach), top
            _mark(*marks, *own, alone)
            ancestor = layout.parents[segment]
            while ancestor >= 0:  # as if the segment stood right behind it
                begin, stop = starts[ancestor], starts[ancestor + 1]
                offset = before[segment] - before[ancestor] + begin - first - reach
                low, high = (max(begin, row + offset) for row in (top + 1, bottom))
                _mark(*marks, low, stop, high, stop, alone)
                ancestor = layout.parents[ancestor]
    return some, full


def _mark(
    some: Tensor, full: Tensor, low: int, high: int, full_low: int, full_high: int, alone: bool
) -> None:
    """Mark blocks that touch keys [low, high); of one segment, those in [full_low, full_high)."""
    if low < high:
        some[low // BLOCK : -(-high // BLOCK)] = True
    if alone and full_low < full_high:
        full[-(-full_low // BLOCK) : full_high // BLOCK] = True
