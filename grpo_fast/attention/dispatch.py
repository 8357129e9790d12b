"""Which kernel computes the attention of packed segments; probed once, logged once for each kind of input.

| kernel       | when                                                             | window | softcap |
|--------------|------------------------------------------------------------------|--------|---------|
| flash_attn   | CUDA, 16 bit, package `flash-attn` (FA2) installed               | yes    | yes     |
| flash_aten   | CUDA, 16 bit: FlashAttention 2 inside torch (aten)               | yes    | no      |
| sdpa         | everything else: padded buckets of segments of similar length    | mask   | no      |
| dense        | a softcap without flash_attn: explicit scores, quadratic memory  | mask   | yes     |

The CUDA rows have not been run on a GPU by this project yet; the wiring around them is tested with a CPU stand-in.
"""

from __future__ import annotations

import logging
from functools import cache
from importlib import metadata
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from grpo_fast.attention.layout import PackedLayout

log = logging.getLogger(__name__)


def segment_attention(
    q: Tensor,  # (T, H, D)
    k: Tensor,  # (T, H_kv, D), H_kv divides H
    v: Tensor,  # (T, H_kv, D)
    layout: PackedLayout,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:  # (T, H, D)
    """Causal attention of each segment on itself: softmax(mask(softcap(scale·q·kᵀ)))·v, `window` keys per query."""
    # A window that no segment reaches is no window; the plain kernels are faster.
    window = window if window and window < layout.max_seqlen else None
    kernel = choose(q.device.type, q.dtype, q.shape[-1], softcap is not None)
    if kernel == "flash_attn":
        return _flash_attn(q, k, v, layout, scale, window, softcap)
    if kernel == "flash_aten":
        return FlashAten.apply(q, k, v, layout, scale, window)
    return _bucketed(q, k, v, layout, scale, window, softcap)


@cache
def choose(device_type: str, dtype: torch.dtype, head_dim: int, has_softcap: bool) -> str:
    """The kernel for this kind of input; says so in the log the first time."""
    flash = device_type == "cuda" and dtype in (torch.float16, torch.bfloat16) and head_dim % 8 == 0 and head_dim <= 256
    if flash and _flash_attn_package() is not None:
        kernel = "flash_attn"
    elif flash and not has_softcap:
        kernel = "flash_aten"
    else:
        kernel = "dense" if has_softcap else "sdpa"
    log.info("packed attention on %s %s, head_dim %d: %s", device_type, dtype, head_dim, kernel)
    return kernel


@cache
def _flash_attn_package() -> Any:
    """FA2's varlen function, or None. FA4 ships a module of the same name, so the distribution's name decides."""
    try:
        metadata.version("flash-attn")
        from flash_attn import flash_attn_varlen_func
    except (metadata.PackageNotFoundError, ImportError):
        return None
    return flash_attn_varlen_func


def _flash_attn(
    q: Tensor, k: Tensor, v: Tensor, layout: PackedLayout, scale: float, window: int | None, softcap: float | None
) -> Tensor:
    cu, longest = layout.cu_seqlens, layout.max_seqlen
    return _flash_attn_package()(
        q, k, v, cu, cu, longest, longest, softmax_scale=scale, causal=True, softcap=softcap or 0.0,
        window_size=(window - 1, 0) if window else (-1, -1), deterministic=True,
    )  # fmt: skip


class FlashAten(torch.autograd.Function):
    """torch's built-in FlashAttention 2 for packed segments, with the same signature in torch 2.11 and 2.13."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, layout: PackedLayout, scale: float, window: int | None
    ) -> Tensor:
        cu, longest = layout.cu_seqlens, layout.max_seqlen
        left = window - 1 if window else -1
        out, lse, rng_state, unused, _ = torch.ops.aten._flash_attention_forward(
            q, k, v, cu, cu, longest, longest, 0.0, True, False, scale=scale, window_size_left=left, window_size_right=0
        )
        ctx.save_for_backward(q, k, v, out, lse, rng_state, unused)
        ctx.layout, ctx.scale, ctx.left = layout, scale, left
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        q, k, v, out, lse, rng_state, unused = ctx.saved_tensors
        cu, longest = ctx.layout.cu_seqlens, ctx.layout.max_seqlen
        dq, dk, dv = torch.ops.aten._flash_attention_backward(
            grad.contiguous(), q, k, v, out, lse.contiguous(), cu, cu, longest, longest, 0.0, True, rng_state, unused,
            scale=ctx.scale, window_size_left=ctx.left, window_size_right=0,
        )  # fmt: skip
        return dq, dk, dv, None, None, None


def _bucketed(
    q: Tensor, k: Tensor, v: Tensor, layout: PackedLayout, scale: float, window: int | None, softcap: float | None
) -> Tensor:
    """Segments of similar length padded to one block each: causal order keeps the padding, at the end, out of sight."""
    groups = q.shape[1] // k.shape[1]
    if groups > 1:
        k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
    parts = []
    for bucket in layout.buckets:
        # One bucket and nothing padded: the rows stand right already.
        whole = bucket.segments * bucket.length == layout.total
        block = (bucket.segments, bucket.length, *q.shape[1:])
        qs, ks, vs = (
            (x if whole else x.index_select(0, bucket.rows)).reshape(block).transpose(1, 2) for x in (q, k, v)
        )
        out = _attend(qs, ks, vs, scale, window, softcap).transpose(1, 2).reshape(-1, *q.shape[1:])
        if whole:
            return out
        parts.append(out.index_select(0, bucket.slots))
    return torch.cat(parts).index_select(0, layout.from_buckets)


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, softcap: float | None) -> Tensor:
    """Causal attention of a block (S, H, L, D)."""
    length = q.shape[2]
    window = window if window and window < length else None
    if window is None and softcap is None:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
    distance = torch.arange(length, device=q.device)[:, None] - torch.arange(length, device=q.device)[None]
    visible = (distance >= 0) & (distance < (window or length))
    if softcap is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=scale)
    scores = softcap * torch.tanh((q @ k.transpose(-1, -2)) * (scale / softcap))
    at_least_fp32 = torch.promote_types(q.dtype, torch.float32)
    weights = scores.to(at_least_fp32).masked_fill(~visible, float("-inf")).softmax(-1)
    return weights.to(v.dtype) @ v
