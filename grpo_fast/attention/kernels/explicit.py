"""Attention with explicit scores, for any device, window and softcap.

The scores are computed for one chunk of queries at a time, and only with the keys that the chunk
attends to. `CHUNK_SCORES` bounds the memory. Products are computed in fp32 or fp64.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from grpo_fast.attention.kernels.kernel import Gradients, Result, Saved, over_spans
from grpo_fast.attention.layout import AttentionParams

# Maximum number of scores in one chunk, heads·queries·keys. 4M scores need 16 MiB in fp32.
CHUNK_SCORES = 2**22
# Minimum number of queries in a chunk, because matrix products with fewer rows are slow.
LEAST_QUERIES = 16


class Chunk(NamedTuple):
    queries: slice
    keys: slice
    visible: Tensor | None  # (queries, keys) bool; None: all


def _forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, params: AttentionParams) -> Result:
    acc_dtype = torch.promote_types(q.dtype, torch.float32)
    qs, ks, vs = _heads(q, k, v)
    out, lse = (qs.new_empty(x, dtype=acc_dtype) for x in (qs.shape, qs.shape[:-1]))
    for chunk in _chunks(qs, ks, causal, params.window):
        scores, _ = _scores(qs, ks, chunk, params)
        lse[:, chunk.queries] = chunk_lse = scores.logsumexp(-1)
        weights = scores.sub_(chunk_lse[..., None]).exp_()
        out[:, chunk.queries] = weights @ vs[:, chunk.keys].to(acc_dtype)
    return out.transpose(0, 1), lse


def _backward(grad: Tensor, saved: Saved, causal: bool, params: AttentionParams) -> Gradients:
    lse = saved.lse
    acc_dtype = lse.dtype
    qs, ks, vs = _heads(*saved[:3])
    gs, os = (x.transpose(0, 1).to(acc_dtype) for x in (grad, saved.out))
    # Compute the gradient of the scores with the formula of FlashAttention, dS = P∘(dP − D) with D
    # = rowsum(dO∘O).
    delta = (gs * os).sum(-1)
    dq = qs.new_empty(qs.shape, dtype=acc_dtype)
    dk, dv = (x.new_zeros(x.shape, dtype=acc_dtype) for x in (ks, vs))
    for chunk in _chunks(qs, ks, causal, params.window):
        at = (slice(None), chunk.queries)
        seen = (slice(None), chunk.keys)
        scores, slope = _scores(qs, ks, chunk, params)
        weights = scores.sub_(lse[at][..., None]).exp_()
        dv[seen] += weights.mT @ gs[at]
        weights *= (gs[at] @ vs[seen].to(acc_dtype).mT).sub_(delta[at][..., None])
        weights *= params.scale if slope is None else slope.mul_(params.scale)
        dq[at] = weights @ ks[seen].to(acc_dtype)
        dk[seen] += weights.mT @ qs[at].to(acc_dtype)
    return dq.transpose(0, 1), dk.transpose(0, 1), dv.transpose(0, 1)


def _heads(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v as (H, L, D). Each key head is repeated for its query heads."""
    groups = q.shape[1] // k.shape[1]
    ks, vs = (x.repeat_interleave(groups, dim=1).transpose(0, 1) for x in (k, v))
    return q.transpose(0, 1), ks, vs


def _chunks(q: Tensor, k: Tensor, causal: bool, window: int | None) -> Iterator[Chunk]:
    """Yield chunks of queries (H, L, D), each with at most about CHUNK_SCORES scores."""
    heads, queries, _ = q.shape
    keys = k.shape[1]
    # Align causal spans at the bottom right: query i attends to the keys up to i + before.
    before = keys - queries
    rows = max(LEAST_QUERIES, CHUNK_SCORES // (heads * keys))
    if window is not None:
        rows = max(LEAST_QUERIES, min(rows, window))
    for start in range(0, queries, rows):
        stop = min(start + rows, queries)
        if not causal:
            yield Chunk(slice(start, stop), slice(0, keys), None)
            continue
        first = 0 if window is None else max(0, before + start - window + 1)
        last = before + stop
        rows_, columns = (torch.arange(*x, device=q.device) for x in ((start, stop), (first, last)))
        distance = rows_[:, None] + before - columns
        seen = (distance >= 0) & (distance < (window or keys))
        yield Chunk(slice(start, stop), slice(first, last), seen)


def _scores(
    q: Tensor, k: Tensor, chunk: Chunk, params: AttentionParams
) -> tuple[Tensor, Tensor | None]:
    """Compute the masked scores of a chunk, and the derivative of the softcap.

    Returns:
        (scores, slope), each (H, queries, keys). The slope is None without a softcap.
    """
    acc_dtype = torch.promote_types(q.dtype, torch.float32)
    scores = q[:, chunk.queries].to(acc_dtype) @ k[:, chunk.keys].to(acc_dtype).mT
    slope = None
    if params.softcap is None:
        scores.mul_(params.scale)
    else:
        capped = scores.mul_(params.scale / params.softcap).tanh_()
        slope = 1 - capped.square()
        scores = capped.mul_(params.softcap)
    if chunk.visible is not None:
        scores.masked_fill_(~chunk.visible, -torch.inf)
    return scores, slope


forward, backward = over_spans(_forward, _backward)
