"""Attention of a packed row, where each segment attends causally to itself and its ancestors.

Without parents this is one varlen call. A tree needs one more call for every distance to an
ancestor (`TreeLayout.calls`). The results are merged by their log-sum-exps:

    (o₁, l₁) = attention of q on k and v of the same segment, causal
    (o₂, l₂) = attention of q[segments with a j-th ancestor] on k and v[j-th ancestors], not causal
    l = logaddexp(l₁, l₂)        o = o₁·exp(l₁ − l) + o₂·exp(l₂ − l)

The backward pass calls the backward function of every call with the merged (o, l). P = exp(S − l)
and D = rowsum(dO∘O) are then the values of the full softmax, and the sum over the calls is the
exact gradient. It would be wrong to merge differentiable outputs instead, because FlashAttention
silently drops the gradient of the log-sum-exp, which is a term of dq and dk.

An attention sink is one more key of every query, with the score s and the value 0. It is merged
last: l' = logaddexp(l, s) and o' = o·exp(l − l'). The backward functions get (o', l'), and the
gradient of the sink is −Σ exp(s − l')·D.

A sliding window begins at a different key for each query, so a separate call on an ancestor cannot
represent it. With a window, a tree therefore uses one causal call in which each segment's keys are
preceded by copies of the keys inside the window (`TreeLayout.window_calls`).

`attend_flex` computes the same on CUDA with torch's flex_attention. It is used for inputs that no
FlashAttention kernel supports. The block mask is built one row of blocks at a time, because
`create_block_mask` would store T² entries.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from grpo_fast.attention.layout import AttentionParams, Call, Copies, TreeLayout
from grpo_fast.attention.spans import Kernel, Saved
from grpo_fast.kernels.types import Context

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

Work = tuple[tuple[Call, ...], AttentionParams, Kernel]
# Number of output elements that are merged at once. Merging makes fp32 copies of two 16-bit
# outputs, and this number bounds the memory of the copies.
MERGE_NUMBERS = 2**25


def attend(
    q: Tensor, k: Tensor, v: Tensor, layout: TreeLayout, params: AttentionParams, *, kernel: Kernel
) -> Tensor:
    """Compute the attention output (T, H, D) of q (T, H, D), k and v (T, H_kv, D).

    The function supports first-order gradients only.

    Args:
        kernel: the varlen kernel that computes each call (see the module docstring).
    """
    # Kernels read the numbers of a head as adjacent numbers, without a check.
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    calls = layout.calls
    if params.window is not None and layout.has_tree:
        calls = layout.window_calls(params.window)
    return PackedAttention.apply(q, k, v, params.sinks, (calls, params, kernel))


class PackedAttention(torch.autograd.Function):
    """Autograd function of tree attention.

    It saves q, k, v, the merged output, the merged log-sum-exp and the sinks.
    """

    @staticmethod
    def forward(
        ctx: Context, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, work: Work
    ) -> Tensor:
        (first, *others), params, kernel = ctx.work = work
        out, lse = kernel.forward(q, first.take(k), first.take(v), first.spans, params)
        out = _to_fp32(out, others)
        # Merge the result of each call directly. A variable would keep it in memory during the next
        # call.
        for call in others:
            at = call.queries
            inputs = (call.take(k), call.take(v), call.spans, params)
            merge_(out[at], lse[:, at], *kernel.forward(q[at], *inputs))
        if sinks is not None:
            share = torch.sigmoid(lse - sinks[:, None]).t()[..., None]
            out = out * share.to(torch.promote_types(out.dtype, torch.float32))
            lse = torch.logaddexp(lse, sinks[:, None].to(lse.dtype))
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse, sinks)
        return out

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError("packed attention has no double backward (create_graph=True)")
        (first, *others), params, kernel = ctx.work
        *tensors, sinks = ctx.saved_tensors
        grad, saved = grad.contiguous(), Saved(*tensors)
        grads = list(kernel.backward(grad, saved.part(first), first.spans, params))
        # Convert one gradient at a time, so that its fp32 version is freed before the next
        # conversion.
        for n in range(3):
            if n and isinstance(first.keys, Copies):
                grads[n] = first.keys.sum_copies(grads[n])
            grads[n] = _to_fp32(grads[n], others)
        for call in others:
            inputs = grad[call.queries], saved.part(call), call.spans, params
            targets = zip(grads, (call.queries, call.keys, call.keys), strict=True)
            for (target, rows), part in zip(targets, kernel.backward(*inputs), strict=True):
                target[rows] += part
        d_sinks = None
        if sinks is not None:
            delta = (grad.to(saved.lse.dtype) * saved.out.to(saved.lse.dtype)).sum(-1).t()
            d_sinks = -((sinks[:, None] - saved.lse).exp() * delta).sum(1).to(sinks.dtype)
        return *(x.to(saved.q.dtype) for x in grads), d_sinks, None


def _to_fp32(x: Tensor, merges: list[Call]) -> Tensor:
    """Convert x to fp32 if results of several calls will be added to it.

    In 16 bits, every addition would round the sum, and the errors would accumulate.
    """
    return x if len(merges) < 2 else x.to(torch.promote_types(x.dtype, torch.float32))


def merge_(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> None:
    """Merge attention over two disjoint sets of keys in place.

    Args:
        out: (T, H, D), output for the first set. It is overwritten with the merged output.
        lse: (H, T), log-sum-exp of the first set. It is overwritten with the merged log-sum-exp.
        other: (T, H, D), output for the second set.
        other_lse: (H, T), log-sum-exp of the second set.
    """
    # Compute the weight first, because lse is overwritten below.
    weight = torch.sigmoid(other_lse - lse).t()[..., None]
    rows = max(1, MERGE_NUMBERS // out[0].numel())
    for one, two, share in zip(out.split(rows), other.split(rows), weight.split(rows), strict=True):
        one.copy_(torch.lerp(one.to(share.dtype), two.to(share.dtype), share))
    lse.copy_(torch.logaddexp(lse, other_lse))


# ----------------------------------------------------------------------------------- flex_attention
FLEX_BLOCK = 128  # size of a block of the mask


def attend_flex(
    q: Tensor, k: Tensor, v: Tensor, layout: TreeLayout, params: AttentionParams
) -> Tensor:
    """Compute the attention output (T, H, D) of q (T, H, D), k and v (T, H_kv, D).

    The function is differentiable.
    """
    from torch.nn.attention.flex_attention import AuxRequest

    q4, k4, v4 = (x.transpose(0, 1)[None] for x in (q, k, v))
    mask = layout.cached(("flex", params.window), lambda: _block_mask(layout, params.window))
    # Compile flex_attention only on CUDA. Without compilation it stores all T² scores, but on the
    # CPU only small tests use it.
    sinks = params.sinks
    out = _flex_function(q.is_cuda)(
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
def _flex_function(is_compiled: bool) -> Any:
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
        *_block_indices(some & ~full), *_block_indices(full), BLOCK_SIZE=FLEX_BLOCK,
        mask_mod=mask_mod, seq_lengths=(layout.total, layout.total),
    )  # fmt: skip


def _block_indices(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Convert a (Q, K) bool mask of blocks to the counts and indices of a BlockMask.

    Returns:
        Counts (1, 1, Q) and indices (1, 1, Q, K), both int32. A count is the number of True entries
        in a row, and the indices list these entries first.
    """
    order = blocks.int().argsort(dim=-1, descending=True, stable=True).int()
    return blocks.sum(-1, dtype=torch.int32)[None, None], order[None, None]


def block_map(layout: TreeLayout, window: int | None) -> tuple[Tensor, Tensor]:
    """Return two bool tensors (Q, K): the visible blocks, and the fully visible blocks.

    A block is visible if at least one of its queries attends to one of its keys. It is fully
    visible if all its queries attend to all its keys.
    """
    some = []
    full = []
    padding = (0, -layout.total % FLEX_BLOCK)
    for start in range(0, layout.total, FLEX_BLOCK):
        seen = layout.visible(window, slice(start, start + FLEX_BLOCK))
        seen = F.pad(seen, padding).unflatten(1, (-1, FLEX_BLOCK))  # (queries, K, FLEX_BLOCK)
        some.append(seen.any(2).any(0))
        full.append(seen.all(2).all(0) & (len(seen) == FLEX_BLOCK))
    return torch.stack(some), torch.stack(full)
