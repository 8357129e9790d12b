"""Decoding step in C++ for the CPU, which adds one token to every completion.

csrc/api/decode.cpp computes the attention, and csrc/api/decoder.cpp computes a full Llama-like
decoder layer. Keys and values are stored in tiles of TILE tokens. The bits of a row do not depend
on the batch or on the number of threads.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from grpo_fast.kernels.cpu import loader
from grpo_fast.kernels.cpu.gemm import uses_tiles
from grpo_fast.kernels.types import contiguous_rows

TILE = 16  # tokens

# A pair (keys, values) for N sequences. The keys are (N, H_kv, tiles, D, TILE), and the values are
# (N, H_kv, tiles, TILE, D).
Tiles = tuple[Tensor, Tensor]


def runs(x: Tensor) -> bool:
    """Return whether the C++ decoding step supports the device and dtype of x, and can be loaded.

    The supported dtypes are fp32 and bf16. With bf16 tensors, the step computes in fp32.
    """
    is_supported = x.is_cpu and x.dtype in (torch.float32, torch.bfloat16)
    return is_supported and loader.unavailable("decode") is None


def tiles_of(k: Tensor, v: Tensor) -> Tiles:
    """Convert keys and values to tiles, and pad the last tile with zeros.

    Args:
        k: (N, H_kv, L, D) keys.
        v: (N, H_kv, L, D) values.
    """
    k, v = (F.pad(x, (0, 0, 0, -x.shape[2] % TILE)).unflatten(2, (-1, TILE)) for x in (k, v))
    return k.mT.contiguous(), v.contiguous()


def grow_tiles(old: Tiles | tuple[()], prompts: Tiles, rows: int, tokens: int) -> Tiles:
    """Allocate larger tiles for B completions, and copy the existing tiles into them.

    Args:
        old: tiles of the completions so far, or ().
        prompts: tiles of the prompts, which determine heads, head size and dtype.
        rows: number of completions, B.
        tokens: number of tokens per completion for which to allocate space.
    """
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
    lengths: Tensor,  # (N,) int64, tokens of each prompt
    counts: Tensor,  # (N,) int64, completions of each prompt
    time: int,
    scale: float,
    window: int | None,
) -> Tensor:  # (B, H, D) fp32
    """Append one token to every completion, and compute its attention output.

    The queries attend to the prompt and to the completion, including the new token.

    Args:
        q: (H, B, D) fp32 queries of the new tokens.
        k: (H_kv, B, D) fp32 keys of the new tokens.
        v: (H_kv, B, D) fp32 values of the new tokens.
        prompts: tiles of N prompts.
        completions: tiles of B completions, modified in place.
        lengths: (N,) int64 lengths of the prompts.
        counts: (N,) int64 number of completions of each prompt. Completions of a prompt are
            adjacent rows.
        time: index of the new token in its completion.
        scale: number by which the attention scores are multiplied.
        window: maximum number of tokens to which a query attends, including its own; None: no
            limit.

    Returns:
        (B, H, D) fp32 attention outputs.
    """
    # Copy a tensor whose last dimension is not contiguous. The kernel accepts any strides in the
    # other dimensions.
    q, k, v = map(contiguous_rows, (q, k, v))
    return loader.operator("decode", "decode_")(
        q, k, v, *prompts, *completions, lengths, counts, time, scale, window
    )


class LayerWeights(NamedTuple):
    """Weights of one decoder layer. The weights of its linear layers were packed by `pack`."""

    norm: Tensor  # (hidden,) RMSNorm before the attention
    qkv: Tensor  # queries, keys and values, concatenated
    bias: Tensor | None  # in the order of qkv
    q_norm: Tensor | None  # (D,) RMSNorm applied to every head
    k_norm: Tensor | None
    out: Tensor
    post_norm: Tensor  # (hidden,) RMSNorm before the MLP
    gate_up: Tensor
    down: Tensor
    heads: int
    inner: int  # number of columns of gate and of up
    eps: float  # epsilon of all norms
    tiles: bool = False  # True multiplies bf16 weights with AMX


def pack(*weights: Tensor) -> Tensor:
    """Concatenate fp32 or bf16 weights (N, K) along N, and pack them into one tensor for `linear`.

    The packed layout makes products with few rows of activations fast.

    Raises:
        CsrcUnavailable: the C++ kernels cannot be loaded.
    """
    return loader.operator("decoder", "pack")(torch.cat(weights))


def linear(x: Tensor, weight: Tensor, width: int) -> Tensor:  # (B, K) fp32, packed -> (B, width)
    """Compute the product x·weightᵀ, (B, width) fp32, with a packed weight.

    The weight must be the result of `pack` for a single (width, K) matrix. If the weight is bf16, x
    is rounded to bf16, too.
    """
    return loader.operator("decoder", "linear")(x.contiguous(), weight, width, uses_tiles(weight))


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
    """Apply one decoder layer to the hidden states x of the new tokens, in place.

    The keys and values of x are stored as token `time` of the completions. The arguments from
    `prompts` to `window` have the same meaning as in `decode_`.
    """
    operator = loader.operator("decoder", "decode_layer_")
    operator(x, *layer, cos, sin, *prompts, *completions, lengths, counts, time, scale, window)
