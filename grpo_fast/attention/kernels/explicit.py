"""Attention with explicit scores, a chunk of queries at a time, in plain torch: any device, window
and softcap.

Of a chunk only the keys that it can see are multiplied, so a sliding window costs (window + chunk)
keys per query, and memory is bounded by `CHUNK_SCORES`. Products are taken in fp32 or better.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from grpo_fast.attention.kernels.kernel import Saved, empty_gradients
from grpo_fast.attention.spans import Block, Rule, Spans
from grpo_fast.kernels.workspace import unset

Result = TypeVar("Result")

# Scores of one chunk (N·H·queries·keys); 4M are 16 MiB in fp32.
CHUNK_SCORES = 2**22
# A chunk no shorter than this, whatever the heads and keys: matrix products of fewer rows run
# slowly.
LEAST_QUERIES = 16


class Chunk(NamedTuple):
    """Some queries of a block and the keys they can see."""

    queries: slice
    keys: slice
    visible: Tensor | None  # (queries, keys) bool, None for all


def without_autocast(function: Callable[..., Result]) -> Callable[..., Result]:
    """Autocast would take the fp32 products in 16 bits."""

    @wraps(function)
    def wrapped(first: Tensor, *rest: Any) -> Result:
        with torch.autocast(first.device.type, enabled=False):
            return function(first, *rest)

    return wrapped


@without_autocast
def forward(q: Tensor, k: Tensor, v: Tensor, spans: Spans, rule: Rule) -> tuple[Tensor, Tensor]:
    """(Tq, H, D), (Tk, H_kv, D) twice → output (Tq, H, D) and lse (H, Tq) in fp32 or better."""
    wide = torch.promote_types(q.dtype, torch.float32)
    out, lse = unset(torch.empty_like, q), unset(q.new_empty, q.shape[:2], dtype=wide)
    for block in spans.blocks:
        qs, ks, vs = _stack(block, q, k, v)
        shapes = qs.shape, qs.shape[:-1]
        part, part_lse = (unset(qs.new_empty, shape, dtype=wide) for shape in shapes)
        for chunk in _chunks(block, spans.causal, rule.window, qs.shape[1], q.device):
            scores, _ = _scores(qs, ks, chunk, rule)
            chunk_lse = scores.logsumexp(-1)
            weights = scores.sub_(chunk_lse[..., None]).exp_()
            part[:, :, chunk.queries] = weights @ vs[:, :, chunk.keys].to(wide)
            part_lse[:, :, chunk.queries] = chunk_lse
        block.queries.put_(out, part.transpose(1, 2).to(out.dtype))
        block.queries.put_(lse, part_lse.transpose(1, 2))
    return out, lse.t()


@without_autocast
def backward(grad: Tensor, saved: Saved, spans: Spans, rule: Rule) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v; the output and lse may be merged with those of other keys."""
    q, k, v, out, lse = saved
    dq, dk, dv = empty_gradients(saved, spans)
    for block in spans.blocks:
        qs, ks, vs = _stack(block, q, k, v)
        gs = block.queries.stack_zero_padded(grad).transpose(1, 2).to(lse.dtype)
        os = block.queries.stack(out).transpose(1, 2).to(lse.dtype)
        ls = block.queries.stack(lse.t()).transpose(1, 2)
        delta = (gs * os).sum(-1)
        dqs = unset(qs.new_empty, qs.shape, dtype=lse.dtype)
        dks, dvs = (x.new_zeros(x.shape, dtype=lse.dtype) for x in (ks, vs))
        for chunk in _chunks(block, spans.causal, rule.window, qs.shape[1], q.device):
            every = slice(None), slice(None)
            at, seen = (*every, chunk.queries), (*every, chunk.keys)
            scores, slope = _scores(qs, ks, chunk, rule)
            weights = scores.sub_(ls[at][..., None]).exp_()
            dvs[seen] += weights.mT @ gs[at]
            weights *= (gs[at] @ vs[seen].to(lse.dtype).mT).sub_(delta[at][..., None])
            weights *= rule.scale if slope is None else slope.mul_(rule.scale)
            dqs[at] = weights @ ks[seen].to(lse.dtype)
            dks[seen] += weights.mT @ qs[at].to(lse.dtype)
        block.queries.put_(dq, dqs.transpose(1, 2).to(q.dtype))
        for target, part in ((dk, dks), (dv, dvs)):
            heads = part.transpose(1, 2).unflatten(2, (target.shape[1], -1)).sum(3)
            block.keys.put_(target, heads.to(target.dtype))
    return dq, dk, dv


def _stack(block: Block, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(N, H, L, D) each, key heads repeated."""
    groups = q.shape[1] // k.shape[1]
    ks, vs = (block.keys.stack(x).repeat_interleave(groups, dim=2).transpose(1, 2) for x in (k, v))
    return block.queries.stack(q).transpose(1, 2), ks, vs


def _chunks(
    block: Block, causal: bool, window: int | None, heads: int, device: torch.device
) -> Iterator[Chunk]:
    """Cut the queries of a block so that the scores of a chunk stay under CHUNK_SCORES."""
    queries, keys = block.queries.length, block.keys.length
    before = keys - queries  # keys that stand before the first query, when causal
    rows = max(LEAST_QUERIES, CHUNK_SCORES // (block.queries.count * heads * keys))
    if window is not None:
        rows = max(LEAST_QUERIES, min(rows, window))
    for start in range(0, queries, rows):
        stop = min(start + rows, queries)
        if not causal:
            yield Chunk(slice(start, stop), slice(0, keys), None)
            continue
        first = 0 if window is None else max(0, before + start - window + 1)
        last = before + stop
        rows_, columns = (torch.arange(*x, device=device) for x in ((start, stop), (first, last)))
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
