"""Varlen attention kernels: their interface, kernels for any device, and FlashAttention on CUDA.

Two kernels compute short spans of equal lengths in one call (`Spans.batches`), and all other spans
one at a time:

- `flash_cpu` is torch's CPU FlashAttention. It does not support fp16, windows or softcaps.
- `explicit` stores the scores as a tensor. It supports any device, window and softcap. The scores
  are computed for one chunk of queries at a time, and only for the keys to which the chunk attends.
  `CHUNK_SCORES` bounds the memory. Products are computed in fp32 or fp64.

The kernels on CUDA are FlashAttention 2 as built into torch, and the packages for versions 2, 3 and
4. Their inputs are 16-bit tensors q (Tq, H, D), k and v (Tk, H_kv, D), with D a multiple of 8 up to
256, and int32 offsets of the spans. Outputs are the attention output and lse (H, Tq) in fp32. Each
function calls the operator that the autograd class of its library also calls. The backward pass can
therefore receive an output and lse that were merged from several calls. The signatures match torch
2.11 to 2.13, flash-attn 2.8, flash_attn_interface (FA3) and flash_attn.cute (FA4). The backward
pass is deterministic if torch uses deterministic algorithms.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from typing import NamedTuple

import torch
from torch import Tensor

from grpo_fast.attention.layout import AttentionParams, Call, SpanBatch, Spans

Result = tuple[Tensor, Tensor]  # output and lse
Gradients = tuple[Tensor, Tensor, Tensor]  # dq, dk, dv


class Saved(NamedTuple):
    """Inputs and results of a forward pass, which the backward pass needs."""

    q: Tensor  # (Tq, H, D)
    k: Tensor  # (Tk, H_kv, D)
    v: Tensor  # (Tk, H_kv, D)
    out: Tensor  # (Tq, H, D)
    lse: Tensor  # (H, Tq)

    def part(self, call: Call) -> Saved:
        """Select the queries, keys, values and results that belong to one attention call."""
        at = call.queries
        return Saved(
            self.q[at], call.take(self.k), call.take(self.v), self.out[at], self.lse[:, at]
        )


class Kernel(NamedTuple):
    """Attention over `Spans`, with separate forward and backward functions.

    The functions are separate because the results of several calls are merged between forward and
    backward. A span of keys may have no queries, in which case its dk and dv are zero. A span of
    queries always has keys.

    Attributes:
        forward: (q (Tq, H, D), k (Tk, H_kv, D), v, spans, params) → output (Tq, H, D) and
            lse (H, Tq). lse is fp32 or fp64.
        backward: (grad (Tq, H, D), saved, spans, params) → dq, dk, dv. The output and lse in
            `saved` may include the results of calls on other keys.
    """

    forward: Callable[..., Result]
    backward: Callable[..., Gradients]


def over_spans(forward: Callable[..., Result], backward: Callable[..., Gradients]) -> Kernel:
    """Build a `Kernel` from two functions that compute spans of equal lengths.

    Short spans of equal lengths are computed in one call, because the overhead of a call is larger
    than the work of a short span (`Spans.batches`). Autocast is disabled, because it would compute
    fp32 products in 16 bits.

    The dimensions are: Z, the number of spans times the number of key heads; M, the number of query
    heads of each key head; L and S, the numbers of queries and keys of a span. In a causal span,
    the keys are expanded to M. In other spans, such as that of completions on their prompt, the
    query heads of a key head are folded into M times as many queries, and M is 1. This avoids
    copies of the keys and separate gradients for each query head.

    Args:
        forward: (q (Z, M, L, D), k (Z, M, S, D), v (Z, M, S, D), causal, params) →
            output (Z, M, L, D) and lse (Z, M, L). lse is fp32 or fp64.
        backward: (grad (Z, M, L, D), saved, causal, params) → dq (Z, M, L, D), dk and
            dv (Z, M, S, D), for each query head separately. `saved` contains the inputs and results
            of `forward`.
    """

    def run(q: Tensor, k: Tensor, v: Tensor, spans: Spans, params: AttentionParams) -> Result:
        # Use fp32 for the log-sum-exps, because merging subtracts nearly equal log-sum-exps.
        acc_dtype = torch.promote_types(q.dtype, torch.float32)
        out = torch.empty_like(q)
        lse = q.new_empty(q.shape[1::-1], dtype=acc_dtype)
        lse_rows = lse.t()[..., None]  # (Tq, H, 1), a view of lse
        heads = k.shape[1]
        with torch.autocast(q.device.type, enabled=False):
            for batch in spans.batches:
                inputs = _inputs(batch, heads, q, k, v, is_causal=spans.causal)
                batch_out, batch_lse = forward(*inputs, spans.causal, params)
                _put_(out, batch.queries, batch_out, batch.size, heads)
                _put_(lse_rows, batch.queries, batch_lse[..., None], batch.size, heads)
        return out, lse

    def back(grad: Tensor, saved: Saved, spans: Spans, params: AttentionParams) -> Gradients:
        q, k, v, out, lse = saved
        dq, dk, dv = (torch.empty_like(x) for x in saved[:3])
        if 0 in spans.queries:
            dk.zero_()
            dv.zero_()
        results = (grad, out, lse.t()[..., None])
        heads = k.shape[1]
        with torch.autocast(q.device.type, enabled=False):
            for batch in spans.batches:
                inputs = _inputs(batch, heads, q, k, v, is_causal=spans.causal)
                batch_grad, batch_out, batch_lse = (
                    _queries(x, batch, heads, is_causal=spans.causal) for x in results
                )
                batch_saved = Saved(*inputs, batch_out, batch_lse[..., 0])
                parts = backward(batch_grad, batch_saved, spans.causal, params)
                _put_(dq, batch.queries, parts[0], batch.size, heads)
                # Sum the gradients of all query heads that use the same key head.
                _put_(dk, batch.keys, parts[1].sum(1, keepdim=True), batch.size, heads)
                _put_(dv, batch.keys, parts[2].sum(1, keepdim=True), batch.size, heads)
        return dq, dk, dv

    return Kernel(run, back)


def _inputs(
    batch: SpanBatch, heads: int, q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return q (Z, M, L, D), and k and v (Z, M, S, D), of a batch."""
    q = _queries(q, batch, heads, is_causal=is_causal)
    k, v = (_take(x, batch.keys, batch.size, heads) for x in (k, v))
    return q, k.expand(-1, q.shape[1], -1, -1), v.expand(-1, q.shape[1], -1, -1)


def _queries(x: Tensor, batch: SpanBatch, heads: int, *, is_causal: bool) -> Tensor:
    """Return a batch's queries, or values of its queries, as (Z, M, L, D)."""
    x = _take(x, batch.queries, batch.size, heads)
    # A causal span cannot fold heads, because this changes the order of the queries.
    return x if is_causal else x.flatten(1, 2)[:, None]


def _take(x: Tensor, rows: slice | Tensor, size: int, heads: int) -> Tensor:
    """Return rows of x (T, heads·M, D) as (size·heads, M, L, D).

    The result for a single span is a view of x.
    """
    by_span = x[rows].view(size, -1, heads, x.shape[1] // heads, x.shape[2])
    return by_span.permute(0, 2, 3, 1, 4).flatten(0, 1)


def _put_(target: Tensor, rows: slice | Tensor, x: Tensor, size: int, heads: int) -> None:
    """Write x (size·heads, M, L, D) into rows of `target` (T, heads·M, D).

    The heads of x may be folded into its queries.
    """
    by_head = target.view(len(target), heads, -1, target.shape[2])
    by_span = x.reshape(size, heads, by_head.shape[2], -1, x.shape[3]).permute(0, 3, 1, 2, 4)
    by_head[rows] = by_span.flatten(0, 1).to(target.dtype)


# ------------------------------------------------------------------ torch's FlashAttention on a CPU
def _flash_forward(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, params: AttentionParams
) -> Result:
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, causal, scale=params.scale
    )


def _flash_backward(grad: Tensor, saved: Saved, causal: bool, params: AttentionParams) -> Gradients:
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, *saved, 0.0, causal, scale=params.scale
    )


flash_cpu = over_spans(_flash_forward, _flash_backward)


# ------------------------------------------------------------------- Explicit scores, on any device
# Maximum number of scores in one chunk, Z·M·queries·keys. 4M scores need 16 MiB in fp32.
CHUNK_SCORES = 2**22
# Minimum number of queries in a chunk, because matrix products with fewer rows are slow.
LEAST_QUERIES = 16


class Chunk(NamedTuple):
    queries: slice
    keys: slice
    visible: Tensor | None  # (queries, keys) bool; None: all


def _explicit_forward(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, params: AttentionParams
) -> Result:
    acc_dtype = torch.promote_types(q.dtype, torch.float32)
    out, lse = (q.new_empty(x, dtype=acc_dtype) for x in (q.shape, q.shape[:-1]))
    for chunk in _chunks(q, k, causal, params.window):
        scores, _ = _scores(q, k, chunk, params)
        lse[..., chunk.queries] = chunk_lse = scores.logsumexp(-1)
        weights = scores.sub_(chunk_lse[..., None]).exp_()
        out[..., chunk.queries, :] = weights @ v[..., chunk.keys, :].to(acc_dtype)
    return out, lse


def _explicit_backward(
    grad: Tensor, saved: Saved, causal: bool, params: AttentionParams
) -> Gradients:
    q, k, v, out, lse = saved
    acc_dtype = lse.dtype
    grad = grad.to(acc_dtype)
    # Compute the gradient of the scores with the formula of FlashAttention, dS = P∘(dP − D) with D
    # = rowsum(dO∘O).
    delta = (grad * out.to(acc_dtype)).sum(-1, keepdim=True)
    dq = q.new_empty(q.shape, dtype=acc_dtype)
    dk, dv = (x.new_zeros(x.shape, dtype=acc_dtype) for x in (k, v))
    for chunk in _chunks(q, k, causal, params.window):
        at = (..., chunk.queries, slice(None))
        seen = (..., chunk.keys, slice(None))
        scores, slope = _scores(q, k, chunk, params)
        weights = scores.sub_(lse[..., None][at]).exp_()
        dv[seen] += weights.mT @ grad[at]
        weights *= (grad[at] @ v[seen].to(acc_dtype).mT).sub_(delta[at])
        weights *= params.scale if slope is None else slope.mul_(params.scale)
        dq[at] = weights @ k[seen].to(acc_dtype)
        dk[seen] += weights.mT @ q[at].to(acc_dtype)
    return dq, dk, dv


def _chunks(q: Tensor, k: Tensor, causal: bool, window: int | None) -> Iterator[Chunk]:
    """Yield chunks of queries (Z, M, L, D), each with at most about CHUNK_SCORES scores."""
    batch, heads, queries, _ = q.shape
    keys = k.shape[2]
    # Align causal spans at the bottom right: query i attends to the keys up to i + before.
    before = keys - queries
    rows = max(LEAST_QUERIES, CHUNK_SCORES // (batch * heads * keys))
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
        (scores, slope), each (Z, M, queries, keys). The slope is None without a softcap.
    """
    acc_dtype = torch.promote_types(q.dtype, torch.float32)
    queries, keys = q[..., chunk.queries, :], k[..., chunk.keys, :]
    scores = queries.to(acc_dtype) @ keys.to(acc_dtype).mT
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


explicit = over_spans(_explicit_forward, _explicit_backward)


# --------------------------------------------------------------------------- FlashAttention on CUDA
def longest(spans: Spans) -> tuple[int, int]:
    """Return the length of the longest query span and the length of the longest key span.

    The first length is at least 2, because FA2 would use its decoding path for a single query.
    """
    return max(2, *spans.queries), max(spans.keys)


def window_sides(spans: Spans, params: AttentionParams) -> tuple[int, int]:
    """Return how many keys before and after its own position a query sees. −1 means all keys."""
    if not spans.causal:
        return -1, -1
    return (-1 if params.window is None else params.window - 1), 0


# The next two functions use torch's built-in FlashAttention 2.
def aten_forward(q: Tensor, k: Tensor, v: Tensor, spans: Spans, params: AttentionParams) -> Result:
    left, right = window_sides(spans, params)
    return torch.ops.aten._flash_attention_forward(
        q, k, v, spans.cu_q, spans.cu_k, *longest(spans), 0.0, spans.causal, False,
        scale=params.scale, window_size_left=left, window_size_right=right,
    )[:2]  # fmt: skip


def aten_backward(grad: Tensor, saved: Saved, spans: Spans, params: AttentionParams) -> Gradients:
    left, right = window_sides(spans, params)
    # Pass an unused random state, because the kernel reads it only for dropout.
    state = torch.empty(2, dtype=torch.uint64, device=grad.device)
    return torch.ops.aten._flash_attention_backward(
        grad, *saved[:4], saved.lse.contiguous(), spans.cu_q, spans.cu_k, *longest(spans), 0.0,
        spans.causal, state, state[:0], scale=params.scale, window_size_left=left,
        window_size_right=right,
    )  # fmt: skip


# The next two functions use the package flash-attn (FA2).
def fa2_forward(q: Tensor, k: Tensor, v: Tensor, spans: Spans, params: AttentionParams) -> Result:
    return import_module("flash_attn.flash_attn_interface")._flash_attn_varlen_forward(
        q, k, v, dropout_p=0.0, causal=spans.causal, **_arguments(spans, params)
    )[:2]


def fa2_backward(grad: Tensor, saved: Saved, spans: Spans, params: AttentionParams) -> Gradients:
    # Allocate the gradients here, because the library writes them into tensors of the caller.
    gradients = _empty_gradients(*saved[:3])
    import_module("flash_attn.flash_attn_interface")._flash_attn_varlen_backward(
        grad, *saved[:4], saved.lse.contiguous(), *gradients, dropout_p=0.0, causal=spans.causal,
        alibi_slopes=None, **_determinism(), **_arguments(spans, params),
    )  # fmt: skip
    return gradients


# The next two functions use flash_attn_interface (FA3).
def fa3_forward(q: Tensor, k: Tensor, v: Tensor, spans: Spans, params: AttentionParams) -> Result:
    return import_module("flash_attn_interface")._flash_attn_forward(
        q, k, v, causal=spans.causal, **_arguments(spans, params)
    )[:2]


def fa3_backward(grad: Tensor, saved: Saved, spans: Spans, params: AttentionParams) -> Gradients:
    dq, dk, dv = _empty_gradients(*saved[:3])
    import_module("flash_attn_interface")._flash_attn_backward(
        grad, *saved[:4], saved.lse.contiguous(), dq=dq, dk=dk, dv=dv, is_causal=spans.causal,
        **_determinism(), **_arguments(spans, params),
    )  # fmt: skip
    return dq, dk, dv


# The next two functions use flash_attn.cute (FA4). It represents a window over all keys by None,
# and sets the right side of a causal window itself.
def fa4_forward(q: Tensor, k: Tensor, v: Tensor, spans: Spans, params: AttentionParams) -> Result:
    return import_module("flash_attn.cute.interface")._flash_attn_fwd(
        q, k, v, causal=spans.causal, return_lse=True, **_arguments(spans, params, is_fa4=True)
    )[:2]


def fa4_backward(grad: Tensor, saved: Saved, spans: Spans, params: AttentionParams) -> Gradients:
    if 0 in spans.queries:
        # Drop the spans that have keys but no queries, because early releases of FA4 hang on them
        # or store undefined values.
        inner, rows = spans.with_queries
        seen = saved._replace(k=saved.k[rows], v=saved.v[rows])
        dq, *parts = fa4_backward(grad, seen, inner, params)
        dk, dv = (torch.zeros_like(saved.k).index_copy_(0, rows, x) for x in parts)
        return dq, dk, dv
    return import_module("flash_attn.cute.interface")._flash_attn_bwd(
        *saved[:4], grad, saved.lse.contiguous(), causal=spans.causal, **_determinism(),
        **_arguments(spans, params, is_fa4=True),
    )[:3]  # fmt: skip


def _arguments(spans: Spans, params: AttentionParams, *, is_fa4: bool = False) -> dict[str, object]:
    max_q, max_k = longest(spans)
    left, right = window_sides(spans, params)
    options = {
        "cu_seqlens_q": spans.cu_q, "cu_seqlens_k": spans.cu_k,
        "max_seqlen_q": max_q, "max_seqlen_k": max_k, "softmax_scale": params.scale,
        "window_size_left": None if is_fa4 and left < 0 else left,
        "window_size_right": None if is_fa4 and left < 0 else right,
    }  # fmt: skip
    return options if is_fa4 else {**options, "softcap": params.softcap or 0.0}


def _determinism() -> dict[str, bool]:
    return {"deterministic": torch.are_deterministic_algorithms_enabled()}


def _empty_gradients(*tensors: Tensor) -> Gradients:
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in tensors)
    return dq, dk, dv


aten = Kernel(aten_forward, aten_backward)
fa2 = Kernel(fa2_forward, fa2_backward)
fa3 = Kernel(fa3_forward, fa3_backward)
fa4 = Kernel(fa4_forward, fa4_backward)
