"""Attention with explicit scores, a chunk of queries at a time: any device, window and softcap.

Of a chunk only the keys that it can see are multiplied; `CHUNK_SCORES` bounds the memory. Products
are taken in fp32 or better.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from grpo_fast.attention.kernels.kernel import Gradients, Result, Saved, over_blocks
from grpo_fast.attention.spans import Rule

# Scores of one chunk (N·H·queries·keys); 4M are 16 MiB in fp32.
CHUNK_SCORES = 2**22
# A chunk no shorter than this: matrix products of fewer rows run slowly.
LEAST_QUERIES = 16


class Chunk(NamedTuple):
    queries: slice
    keys: slice
    visible: Tensor | None  # (queries, keys) bool, None for all


def _forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, rule: Rule) -> Result:
    wide = torch.promote_types(q.dtype, torch.float32)
    qs, ks, vs = _heads(q, k, v)
    out, lse = (qs.new_empty(x, dtype=wide) for x in (qs.shape, qs.shape[:-1]))
    for chunk in _chunks(qs, ks, causal, rule.window):
        scores, _ = _scores(qs, ks, chunk, rule)
        lse[:, :, chunk.queries] = chunk_lse = scores.logsumexp(-1)
        weights = scores.sub_(chunk_lse[..., None]).exp_()
        out[:, :, chunk.queries] = weights @ vs[:, :, chunk.keys].to(wide)
    return out.transpose(1, 2), lse.transpose(1, 2)


def _backward(grad: Tensor, saved: Saved, causal: bool, rule: Rule) -> Gradients:
    wide = saved.lse.dtype
    qs, ks, vs = _heads(*saved[:3])
    gs, os, ls = (x.transpose(1, 2).to(wide) for x in (grad, saved.out, saved.lse))
    delta = (gs * os).sum(-1)
    dq = qs.new_empty(qs.shape, dtype=wide)
    dk, dv = (x.new_zeros(x.shape, dtype=wide) for x in (ks, vs))
    for chunk in _chunks(qs, ks, causal, rule.window):
        every = slice(None), slice(None)
        at, seen = (*every, chunk.queries), (*every, chunk.keys)
        scores, slope = _scores(qs, ks, chunk, rule)
        weights = scores.sub_(ls[at][..., None]).exp_()
        dv[seen] += weights.mT @ gs[at]
        weights *= (gs[at] @ vs[seen].to(wide).mT).sub_(delta[at][..., None])
        weights *= rule.scale if slope is None else slope.mul_(rule.scale)
        dq[at] = weights @ ks[seen].to(wide)
        dk[seen] += weights.mT @ qs[at].to(wide)
    return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


def _heads(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(N, H, L, D) each, key heads repeated."""
    groups = q.shape[2] // k.shape[2]
    ks, vs = (x.repeat_interleave(groups, dim=2).transpose(1, 2) for x in (k, v))
    return q.transpose(1, 2), ks, vs


def _chunks(q: Tensor, k: Tensor, causal: bool, window: int | None) -> Iterator[Chunk]:
    """Cut the queries (N, H, L, D) so that the scores of a chunk stay under CHUNK_SCORES."""
    queries, keys = q.shape[2], k.shape[2]
    before = keys - queries  # keys that stand before the first query, when causal
    rows = max(LEAST_QUERIES, CHUNK_SCORES // (q.shape[0] * q.shape[1] * keys))
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


def _scores(q: Tensor, k: Tensor, chunk: Chunk, rule: Rule) -> tuple[Tensor, Tensor | None]:
    """Masked scores of a chunk (N, H, queries, keys) and the softcap's slope there."""
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = q[:, :, chunk.queries].to(wide) @ k[:, :, chunk.keys].to(wide).mT
    slope = None
    if rule.softcap is None:
        scores.mul_(rule.scale)
    else:
        capped = scores.mul_(rule.scale / rule.softcap).tanh_()
        slope = 1 - capped.square()
        scores = capped.mul_(rule.softcap)
    if chunk.visible is not None:
        scores.masked_fill_(~chunk.visible, -torch.inf)
    return scores, slope


forward, backward = over_blocks(_forward, _backward)
