"""Select the kernel that computes the attention of packed rows.

For each kind of input, the kernels of PROVIDERS are tested in order. A test compares a kernel with
the dense reference on a tiny packed row. The first kernel whose output and gradients agree is used.
The choice is cached and logged. A kernel that fails its test is skipped with a warning.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import cache, partial
from importlib import metadata, util
from typing import NamedTuple

import torch
from torch import Tensor

from grpo_fast.attention import spans, tree
from grpo_fast.attention.layout import AttentionParams, TreeLayout
from grpo_fast.attention.spans import Kernel
from grpo_fast.attention.tree import attend
from grpo_fast.kernels.agree import Pair, draw, in_fresh_thread

log = logging.getLogger(__name__)

# Type of a differentiable attention function (q, k, v, layout, params) → output. The shapes are q
# (T, H, D), k (T, H_kv, D), v (T, H_kv, D) and output (T, H, D).
Attention = Callable[..., Tensor]

# Largest relative error of the output and the gradients at which a kernel is used, for each dtype.
TOLERANCE = {
    torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2
}  # fmt: skip


class Kind(NamedTuple):
    """Properties of the attention inputs that determine which kernel is used."""

    device: str
    dtype: torch.dtype
    head_dim: int
    has_window: bool = False
    has_softcap: bool = False
    has_sinks: bool = False
    gpu: int | None = None  # index of the GPU; None: the current one

    def __str__(self) -> str:
        extras = ["window"] * self.has_window + ["softcap"] * self.has_softcap
        extras += ["sinks"] * self.has_sinks
        dtype = str(self.dtype).removeprefix("torch.")
        device = self.device if self.gpu is None else f"{self.device}:{self.gpu}"
        return ", ".join([f"{device} {dtype}", f"head_dim {self.head_dim}", *extras])


class Provider(NamedTuple):
    """An attention kernel, with a function that says which inputs the kernel supports."""

    name: str  # for the log
    takes: Callable[[Kind], bool]  # returns whether the kernel supports a kind of input
    attend: Attention


def packed_rows_attention(
    q: Tensor,  # (T, H, D)
    k: Tensor,  # (T, H_kv, D), H_kv divides H
    v: Tensor,  # (T, H_kv, D)
    layout: TreeLayout,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,  # (H,)
) -> Tensor:  # (T, H, D)
    """Compute softmax(mask(softcap(scale·q·kᵀ)))·v for packed rows.

    The segments of a packed row form trees. Each segment attends causally to itself and to its
    ancestors. The function supports first-order gradients. Double backward raises a RuntimeError.

    Args:
        q: (T, H, D), float. Queries.
        k: (T, H_kv, D), where H_kv divides H. Keys.
        v: (T, H_kv, D). Values.
        layout: the segments of the row and their parents.
        scale: number by which the scores q·kᵀ are multiplied.
        window: maximum number of keys that a query attends to, including the key at its position.
            None: all keys.
        softcap: bound c, which turns each score s into c·tanh(s/c). None: no bound.
        sinks: (H,). Score of one more key for each head, whose value is 0. None: no such key.

    Returns:
        The attention output, (T, H, D).
    """
    # Ignore a window that is longer than every context, because kernels without a window are
    # faster.
    window = window if window and window < layout.longest_context else None
    kind = Kind(
        q.device.type, q.dtype, q.shape[-1], has_window=window is not None,
        has_softcap=softcap is not None, has_sinks=sinks is not None, gpu=q.device.index,
    )  # fmt: skip
    return choose(kind).attend(q, k, v, layout, AttentionParams(scale, window, softcap, sinks))


@cache
def choose(kind: Kind) -> Provider:
    """Return the first provider that supports this kind of input and agrees with the reference."""
    gpu = kind.gpu
    if kind.device == "cuda" and gpu is None:
        gpu = torch.cuda.current_device()
    for provider in candidates(kind):
        # Compare in a new thread, so that autocast or hooks of the caller cannot affect the choice.
        compare = pair_of(provider.attend, kind).difference
        difference = in_fresh_thread(compare, gpu)
        if difference is None:
            log.info("packed attention on %s: using %s", kind, provider.name)
            return provider
        log.warning("attention kernel %s skipped on %s: %s", provider.name, kind, difference)
    raise RuntimeError(f"no attention kernel agrees with the reference on {kind}")


def candidates(kind: Kind) -> Iterator[Provider]:
    """Return the providers that support a kind of input, best first."""
    return (provider for provider in PROVIDERS if provider.takes(kind))


def pair_of(attention: Attention, kind: Kind) -> Pair:
    """Return a kernel and dense fp64 attention, to compare outputs and gradients.

    The input is a packed row of 43 tokens with two trees of three levels and one segment outside of
    a tree. One segment has a single token. Each of the two key heads serves two query heads.
    """
    lengths = (9, 4, 5, 1, 3, 2, 7, 2, 10)
    parents = (-1, -1, 0, 0, 1, 2, 2, 4, -1)
    window = 4 if kind.has_window else None
    softcap = 3.0 if kind.has_softcap else None
    params = AttentionParams(kind.head_dim**-0.5, window, softcap)

    def run(function: Attention, device: str, dtype: torch.dtype, *inputs: Tensor) -> Tensor:
        q, k, v, *sinks = (x.to(device, dtype) for x in inputs)
        layout = TreeLayout.of(lengths, device, parents=parents)
        return function(q, k, v, layout, params._replace(sinks=sinks[0] if sinks else None))

    shapes: list[tuple[int, ...]] = [(sum(lengths), n, kind.head_dim) for n in (4, 2, 2)]
    shapes += [(4,)] * kind.has_sinks
    inputs = [draw(*shape, seed=n).to(kind.dtype) for n, shape in enumerate(shapes)]
    return Pair(
        partial(run, attention, kind.device, kind.dtype),
        partial(run, dense_attention, "cpu", torch.float64),
        inputs, TOLERANCE[kind.dtype], gradients=True, by_norm=True,
    )  # fmt: skip


def dense_attention(
    q: Tensor, k: Tensor, v: Tensor, layout: TreeLayout, params: AttentionParams
) -> Tensor:
    """Compute packed attention in fp32 or fp64, written directly from the definition.

    Every kernel is compared with this reference. The shapes are those of `packed_rows_attention`.
    """
    acc_dtype = torch.promote_types(q.dtype, torch.float32)
    groups = q.shape[1] // k.shape[1]
    keys, values = (x.to(acc_dtype).repeat_interleave(groups, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.to(acc_dtype), keys) * params.scale
    if params.softcap is not None:
        scores = params.softcap * torch.tanh(scores / params.softcap)
    scores = scores.masked_fill(~layout.visible(params.window), -torch.inf)
    if params.sinks is not None:
        column = params.sinks.to(acc_dtype)[:, None, None].expand(-1, len(q), 1)
        scores = torch.cat([scores, column], -1)
    weights = scores.softmax(-1)[..., : len(k)]
    return torch.einsum("hqk,khd->qhd", weights, values).to(q.dtype)


def _flash(kind: Kind, least: tuple[int, int], most_head_dim: int = 256) -> bool:
    """Return whether a version of FlashAttention supports an input.

    FlashAttention needs a GPU of compute capability `least` or higher, 16-bit inputs, and a
    head_dim that is a multiple of 8 and at most `most_head_dim`.
    """
    is_16_bit = kind.dtype in (torch.float16, torch.bfloat16)
    if kind.device != "cuda" or not is_16_bit or kind.head_dim % 8:
        return False
    fits = kind.head_dim <= most_head_dim
    return fits and torch.cuda.get_device_capability(kind.gpu) >= least


@cache
def _has_distribution(name: str) -> bool:
    """Return whether a Python distribution is installed.

    FA2 and FA4 both install a module `flash_attn`, so the module name does not identify the
    version.
    """
    try:
        return bool(metadata.version(name))
    except metadata.PackageNotFoundError:
        return False


def _is_plain(kind: Kind) -> bool:
    """Return whether torch's CPU kernel supports an input.

    The kernel ignores windows and softcaps. In a causal span, it lets query i attend to the first
    i + 1 keys. This is correct only if the span has as many keys as queries. With a window, a span
    may also contain keys of ancestors, and then has more keys than queries.
    """
    has_extras = kind.has_window or kind.has_softcap
    return kind.device == "cpu" and kind.dtype != torch.float16 and not has_extras


def _varlen(name: str, takes: Callable[[Kind], bool], kernel: Kernel) -> Provider:
    return Provider(name, takes, partial(attend, kernel=kernel))


PROVIDERS = (
    # For 16-bit inputs on CUDA, try FlashAttention 4, then 3, then 2 from the package flash-attn,
    # and finally the FlashAttention 2 that is built into torch.
    _varlen("fa4", lambda kind: _has_distribution("flash-attn-4") and not kind.has_softcap
            and _flash(kind, (9, 0), 128), spans.fa4),
    _varlen("fa3", lambda kind: util.find_spec("flash_attn_interface") is not None
            and _flash(kind, (9, 0)) and not _flash(kind, (10, 0)), spans.fa3),
    _varlen("fa2", lambda kind: _has_distribution("flash-attn") and _flash(kind, (8, 0)),
            spans.fa2),
    _varlen("flash_aten", lambda kind: not kind.has_softcap and _flash(kind, (8, 0)), spans.aten),
    # For other inputs on CUDA, use compiled flex_attention.
    Provider("flex", lambda kind: kind.device == "cuda", tree.attend_flex),
    # For inputs on the CPU, try torch's FlashAttention, with one call for each batch of spans.
    _varlen("flash_cpu", _is_plain, spans.flash_cpu),
    # For all other inputs, use the kernel that stores the scores of one chunk of queries at a time.
    _varlen("explicit", lambda kind: True, spans.explicit),
)  # fmt: skip
