"""One new token of each completion, in C++ for the CPU: its attention (csrc/api/decode.cpp), or a
whole layer of a decoder like Llama's (csrc/api/decoder.cpp).

Keys and values lie in tiles of TILE tokens. A row's bits depend on that row alone: not on the
batch, nor on the number of threads.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from grpo_fast.kernels.cpu import loader
from grpo_fast.kernels.types import contiguous_rows

TILE = 16  # tokens

# (N, H_kv, tiles, D, TILE) and (N, H_kv, tiles, TILE, D): keys and values of N sequences
Tiles = tuple[Tensor, Tensor]


def runs(x: Tensor) -> bool:
    return x.is_cpu and x.dtype == torch.float32 and loader.unavailable("decode") is None


def tiles_of(k: Tensor, v: Tensor) -> Tiles:
    """(N, H_kv, L, D) each → tiles, the last one filled up with zeros."""
    k, v = (F.pad(x, (0, 0, 0, -x.shape[2] % TILE)).unflatten(2, (-1, TILE)) for x in (k, v))
    return k.mT.contiguous(), v.contiguous()


def grow_tiles(old: Tiles | tuple[()], prompts: Tiles, rows: int, tokens: int) -> Tiles:
    """Tiles for at least so many tokens of B completions of these prompts; first what is old."""
    (_, heads, _, depth, _), tiles = prompts[0].shape, -(-tokens // TILE)
    k = prompts[0].new_empty((rows, heads, tiles, depth, TILE))
    v = prompts[0].new_empty((rows, heads, tiles, TILE, depth))
    for new, before in zip((k, v), old, strict=False):
        new[:, :, : before.shape[2]] = before
    return k, v


def decode_(
    q: Tensor,  # (H, B, D) fp32
    k: Tensor,  # (H_kv, B, D) fp32
    v: Tensor,  # (H_kv, B, D) fp32
    prompts: Tiles,  # of N prompts
    completions: Tiles,  # of B completions
    lengths: Tensor,  # (N,) int64 of the prompts
    counts: Tensor,  # (N,) int64: the completions of each, side by side
    time: int,
    scale: float,
    window: int | None,
) -> Tensor:  # (B, H, D) fp32
    """Keep k and v as token `time` of `completions`, and attend to the prompt and to all completions tokens.

    Args:
        window: how many tokens a query sees at most, its completions included; None: all.
    """
    q, k, v = map(contiguous_rows, (q, k, v))
    return loader.operator("decode", "decode_")(
        q, k, v, *prompts, *completions, lengths, counts, time, scale, window
    )


class LayerWeights(NamedTuple):
    """A layer of a decoder; the weights of its linear layers by `pack`."""

    norm: Tensor  # (hidden,) of the RMSNorm before the attention
    qkv: Tensor  # queries, keys and values, one under another
    bias: Tensor | None  # the same order
    q_norm: Tensor | None  # (D,) of an RMSNorm of every head
    k_norm: Tensor | None
    out: Tensor
    post_norm: Tensor  # (hidden,) of the RMSNorm before the MLP
    gate_up: Tensor
    down: Tensor
    heads: int
    inner: int  # columns of gate, and of up
    eps: float  # of every norm


def pack(*weights: Tensor) -> Tensor:
    """(N, K) fp32 each, one under another, as products with few rows read them.

    Raises CsrcUnavailable without the C++ kernels.
    """
    return loader.operator("decoder", "pack")(torch.cat(weights))


def linear(x: Tensor, weight: Tensor, width: int) -> Tensor:  # (B, K) fp32, packed -> (B, width)
    """x·weightᵀ, of a weight (width, K) that was packed alone."""
    out: Tensor = loader.operator("decoder", "linear")(x.contiguous(), weight, width)
    return out


def decode_layer_(
    x: Tensor,  # (B, hidden) fp32, contiguous
    layer: LayerWeights,
    cos: Tensor,  # (B, D)
    sin: Tensor,  # (B, D)
    prompts: Tiles,
    completions: Tiles,
    lengths: Tensor,  # as in decode_
    counts: Tensor,
    time: int,
    scale: float,
    window: int | None,
) -> None:
    """Put x through the layer, in place; its keys and values become token `time` of `completions`."""
    operator = loader.operator("decoder", "decode_layer_")
    operator(x, *layer, cos, sin, *prompts, *completions, lengths, counts, time, scale, window)
