"""Attention over packed rows with torch's flex_attention, on CUDA.

It is used for inputs that no FlashAttention kernel supports. The block mask is built one row of
blocks at a time, because `create_block_mask` would store T² entries.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from grpo_fast.attention.layout import AttentionParams, TreeLayout

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

BLOCK = 128


def attend(q: Tensor, k: Tensor, v: Tensor, layout: TreeLayout, params: AttentionParams) -> Tensor:
    """Compute the attention output (T, H, D) of q (T, H, D), k and v (T, H_kv, D).

    The function is differentiable.
    """
    from torch.nn.attention.flex_attention import AuxRequest

    q4, k4, v4 = (x.transpose(0, 1)[None] for x in (q, k, v))
    mask = layout.cached(("flex", params.window), lambda: _block_mask(layout, params.window))
    # Compile flex_attention only on CUDA. Without compilation it stores all T² scores, but on the
    # CPU only small tests use it.
    sinks = params.sinks
    out = _function(q.is_cuda)(
        q4, k4, v4, score_mod=_score_mod(params.softcap, q.device), block_mask=mask,
        scale=params.scale, enable_gqa=q.shape[1] != k.shape[1],
        return_aux=None if sinks is None else AuxRequest(lse=True),
    )  # fmt: skip
    if sinks is not None:
        out, (lse, *_) = out
        # A sink adds exp(sink) to the denominators exp(lse).
        share = torch.sigmoid(lse - sinks.to(lse.dtype)[None, :, None])
        out = (out * share[..., None]).to(q.dtype)
    return out[0].transpose(0, 1)


@cache
def _function(is_compiled: bool) -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=True) if is_compiled else flex_attention


@cache
def _score_mod(softcap: float | None, device: torch.device) -> Callable[..., Tensor] | None:
    if softcap is None:
        return None
    # Use a tensor, because torch 2.11 cannot compile flex_attention with a float in its closure.
    # Create it outside of inference mode, which `decode` uses. Otherwise, training could not use
    # it later, because autograd cannot save a tensor that was created in inference mode.
    with torch.inference_mode(False):
        bound = torch.tensor(softcap, device=device)

    def cap(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return bound * torch.tanh(score / bound)

    return cap


def _block_mask(layout: TreeLayout, window: int | None) -> BlockMask:
    """Return the BlockMask of a layout.

    The BlockMask lists two kinds of blocks: partly visible blocks, to which the mask function is
    applied, and fully visible blocks, which need no mask. Invisible blocks are skipped.
    """
    from torch.nn.attention.flex_attention import BlockMask

    related = layout.related
    segment = layout.segments
    position = layout.position_ids[0]

    def mask_mod(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        distance = position[query] - position[key]
        seen = related[segment[query], segment[key]]
        return seen & (distance >= 0) & (distance < (window or layout.total + 1))

    some, full = block_map(layout, window)
    return BlockMask.from_kv_blocks(
        *_indices(some & ~full), *_indices(full), BLOCK_SIZE=BLOCK, mask_mod=mask_mod,
        seq_lengths=(layout.total, layout.total),
    )  # fmt: skip


def _indices(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Convert a (Q, K) bool mask of blocks to the counts and indices of a BlockMask.

    Returns:
        Counts (1, 1, Q) and indices (1, 1, Q, K), both int32. A count is the number of True entries
        in a row, and the indices list these entries first.
    """
    order = blocks.int().argsort(dim=-1, descending=True, stable=True).int()
    return blocks.sum(-1, dtype=torch.int32)[None, None], order[None, None]


def block_map(layout: TreeLayout, window: int | None) -> tuple[Tensor, Tensor]:
    """Return two bool tensors (Q, K): the partly visible blocks, and the fully visible blocks.

    A block is partly visible if at least one of its queries attends to one of its keys. It is fully
    visible if all its queries attend to all its keys.
    """
    some = []
    full = []
    padding = (0, -layout.total % BLOCK)
    for start in range(0, layout.total, BLOCK):
        seen = layout.visible(window, slice(start, start + BLOCK))
        seen = F.pad(seen, padding).unflatten(1, (-1, BLOCK))  # (queries, K, BLOCK)
        some.append(seen.any(2).any(0))
        full.append(seen.all(2).all(0) & (len(seen) == BLOCK))
    return torch.stack(some), torch.stack(full)
