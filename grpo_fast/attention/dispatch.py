"""Which kernel computes the attention of packed rows: chosen and logged once for each kind.

The first of PROVIDERS whose output and gradients agree with the dense reference on tiny packed
rows; one that fails is passed over with a line in the log.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import cache, partial
from importlib import metadata, util
from typing import NamedTuple

import torch
from torch import Tensor

from grpo_fast.attention.kernels import csrc, cuda, explicit, flex, reference, torch_cpu
from grpo_fast.attention.kernels.kernel import Kernel
from grpo_fast.attention.kernels.tree import attend
from grpo_fast.attention.layout import TreeLayout
from grpo_fast.attention.spans import AttentionParams
from grpo_fast.kernels.cpu import loader
from grpo_fast.kernels.self_test import apart

log = logging.getLogger(__name__)

# (q (T, H, D), k (T, H_kv, D), v (T, H_kv, D), layout, params) → (T, H, D), differentiable.
Attention = Callable[..., Tensor]

# Relative L2 error of output and gradients beyond which a kernel is taken for broken.
SELF_TEST_TOLERANCE = {
    torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2
}  # fmt: skip


class Kind(NamedTuple):
    device: str
    dtype: torch.dtype
    head_dim: int
    has_window: bool = False
    has_softcap: bool = False
    gpu: int | None = None  # which one; None: the current one

    def __str__(self) -> str:
        extras = ["window"] * self.has_window + ["softcap"] * self.has_softcap
        dtype = str(self.dtype).removeprefix("torch.")
        device = self.device if self.gpu is None else f"{self.device}:{self.gpu}"
        return ", ".join([f"{device} {dtype}", f"head_dim {self.head_dim}", *extras])


class Provider(NamedTuple):
    name: str  # for the log
    takes: Callable[[Kind], bool]  # a kind of input
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
) -> Tensor:  # (T, H, D)
    """softmax(mask(softcap(scale·q·kᵀ)))·v: each segment causally on itself and on its ancestors.

    `window`: the most keys that a query sees, its own included. A double backward: RuntimeError.
    """
    # A window that no query reaches is no window; the plain kernels are faster.
    window = window if window and window < layout.longest_context else None
    has = window is not None, softcap is not None
    kind = Kind(q.device.type, q.dtype, q.shape[-1], *has, q.device.index)
    return choose(kind).attend(q, k, v, layout, AttentionParams(scale, window, softcap))


@cache
def choose(kind: Kind) -> Provider:
    for provider in candidates(kind):
        name = provider.name
        try:
            error = _tested(provider.attend, kind)
        except Exception as problem:  # a foreign kernel may fail in any way; there is another one
            log.warning("attention kernel %s failed on %s: %s; next", name, kind, problem)
            continue
        if error <= SELF_TEST_TOLERANCE[kind.dtype]:
            log.info("packed attention on %s: %s, %.1g from the reference", kind, name, error)
            return provider
        log.warning("attention kernel %s is wrong on %s: off by %.2g; next", name, kind, error)
    raise RuntimeError(f"no attention kernel passed its self-test on {kind}")


def _tested(attention: Attention, kind: Kind) -> float:
    """`self_test` on the GPU of the caller's tensors: a new thread starts on GPU 0."""
    if kind.device != "cuda":
        return apart(lambda: self_test(attention, kind))
    index = torch.cuda.current_device() if kind.gpu is None else kind.gpu

    def run() -> float:
        with torch.cuda.device(index):
            return self_test(attention, kind)

    return apart(run)


def candidates(kind: Kind) -> Iterator[Provider]:
    """The providers that say they can take this kind of input, best first."""
    return (provider for provider in PROVIDERS if provider.takes(kind))


def self_test(attention: Attention, kind: Kind) -> float:
    """Largest relative L2 error of output and gradients against the dense reference; NaN if one is.

    On 43 tokens: two trees of three levels, down to a single token, and a plain segment, with two
    query heads for each key head.
    """
    lengths, parents = (9, 4, 5, 1, 3, 2, 7, 2, 10), (-1, -1, 0, 0, 1, 2, 2, 4, -1)
    limits = 4 if kind.has_window else None, 3.0 if kind.has_softcap else None
    params, results = AttentionParams(kind.head_dim**-0.5, *limits), []
    runs: list[tuple[Attention, str, torch.dtype]] = [
        (attention, kind.device, kind.dtype),
        (reference.attend, "cpu", torch.float64),
    ]
    generator = torch.Generator().manual_seed(0)
    shapes = [(sum(lengths), heads, kind.head_dim) for heads in (4, 2, 2, 4)]
    *inputs, grad = (torch.randn(s, generator=generator).to(kind.dtype) for s in shapes)
    for function, device, dtype in runs:
        leaves = [x.to(device, dtype).requires_grad_() for x in inputs]
        out = function(*leaves, TreeLayout.of(lengths, device, parents=parents), params)
        gradients = torch.autograd.grad(out, leaves, grad.to(device, dtype))
        results.append([out.detach(), *gradients])
    pairs = zip(*results, strict=True)
    # torch's max, not Python's, which may pass over a NaN.
    return float(torch.stack([(x.cpu().double() - y).norm() / y.norm() for x, y in pairs]).max())


def _flash(kind: Kind, least_sm: int, most_head_dim: int = 256) -> bool:
    is_narrow = kind.dtype in (torch.float16, torch.bfloat16)
    if kind.device != "cuda" or not is_narrow or kind.head_dim % 8:
        return False
    return kind.head_dim <= most_head_dim and _compute_capability(kind.gpu) >= least_sm


@cache
def _compute_capability(index: int | None) -> int:
    major, minor = torch.cuda.get_device_capability(index)
    return 10 * major + minor


@cache
def _has_distribution(name: str) -> bool:
    """FA2 and FA4 both ship a module `flash_attn`; their distributions tell them apart."""
    try:
        return bool(metadata.version(name))
    except metadata.PackageNotFoundError:
        return False


def _is_plain(kind: Kind, *dtypes: torch.dtype) -> bool:
    """Whether it is a CPU's, of one of these dtypes, without a window and softcap. Without a window
    a causal span has as many keys as queries: these kernels align the two at the top.
    """
    is_whole = not (kind.has_window or kind.has_softcap)
    return is_whole and kind.device == "cpu" and kind.dtype in dtypes


def _partial(
    takes: Callable[[Kind], bool], name: str, forward: Callable, backward: Callable
) -> Provider:
    return Provider(name, takes, partial(attend, kernel=Kernel(forward, backward)))


PROVIDERS = (
    # CUDA, 16 bits: FlashAttention 4 and 3 on Hopper and later, 2 of the package, 2 inside torch
    _partial(lambda kind: _has_distribution("flash-attn-4") and not kind.has_softcap
             and _flash(kind, 90, 128), "fa4", cuda.fa4_forward, cuda.fa4_backward),
    _partial(lambda kind: util.find_spec("flash_attn_interface") is not None and _flash(kind, 90)
             and _compute_capability(kind.gpu) < 100, "fa3", cuda.fa3_forward, cuda.fa3_backward),
    _partial(lambda kind: _has_distribution("flash-attn") and _flash(kind, 80),
             "fa2", cuda.fa2_forward, cuda.fa2_backward),
    _partial(lambda kind: not kind.has_softcap and _flash(kind, 80),
             "flash_aten", cuda.aten_forward, cuda.aten_backward),
    # CUDA, anything else: compiled flex_attention
    Provider("flex", lambda kind: kind.device == "cuda", flex.attend),
    # CPUs: our own in C++; torch's FlashAttention, a call for each span
    _partial(lambda kind: _is_plain(kind, torch.float32) and not loader.unavailable("attention"),
             "csrc", csrc.forward, csrc.backward),
    _partial(lambda kind: _is_plain(kind, torch.float32, torch.float64, torch.bfloat16),
             "flash_cpu", torch_cpu.forward, torch_cpu.backward),
    # any device, window and softcap: explicit scores in chunks of queries
    _partial(lambda kind: True, "explicit", explicit.forward, explicit.backward),
)  # fmt: skip
