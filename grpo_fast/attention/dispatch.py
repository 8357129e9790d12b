"""Which kernel computes the attention of packed rows: probed, tested and logged once for each kind
of input.

| kernel     | when                                                         | window | softcap |
|------------|--------------------------------------------------------------|--------|---------|
| fa4        | CUDA from sm90, 16 bit, D ≤ 128, distribution `flash-attn-4` | yes    | no      |
| fa3        | CUDA sm90, 16 bit, module `flash_attn_interface`             | yes    | yes     |
| fa2        | CUDA from sm80, 16 bit, distribution `flash-attn` ≥ 2.8      | yes    | yes     |
| flash_aten | CUDA from sm80, 16 bit: FlashAttention 2 inside torch        | yes    | no      |
| flex       | other CUDA: flex_attention, compiled                         | yes    | yes     |
| csrc       | CPU, fp32: our own in C++, without padding                   | no     | no      |
| flash_cpu  | CPU: torch's FlashAttention, similar lengths in one call     | no     | no      |
| explicit   | any device: explicit scores in chunks of queries             | yes    | yes     |

The first whose conditions hold and whose output and gradients agree with the dense reference on a
tiny packed row is taken; one that fails is passed over with a line in the log. 16 bit kernels need
a head size divisible by 8, up to 256.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from importlib import metadata, util
from typing import NamedTuple

import torch
from torch import Tensor

from grpo_fast.attention.kernels import csrc, cuda, explicit, flex, reference, torch_cpu
from grpo_fast.attention.kernels.kernel import Kernel
from grpo_fast.attention.kernels.tree import attend
from grpo_fast.attention.layout import TreeLayout
from grpo_fast.attention.spans import Rule
from grpo_fast.kernels.cpu import loader
from grpo_fast.kernels.self_test import apart

log = logging.getLogger(__name__)

# (q (T, H, D), k (T, H_kv, D), v (T, H_kv, D), layout, rule) → (T, H, D), differentiable.
Attention = Callable[..., Tensor]

# Relative L2 error of output and gradients beyond which a kernel is taken for broken: a few times
# its rounding.
SELF_TEST_TOLERANCE = {
    torch.float64: 1e-10,
    torch.float32: 1e-4,
    torch.float16: 1e-2,
    torch.bfloat16: 5e-2,
}


class Kind(NamedTuple):
    """The properties of a call by which its kernel is chosen."""

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
    """One kernel.

    Attributes:
        name: for the log.
        why_not: why it cannot take a kind of input, or None if it can.
        attend: computes it.
    """

    name: str
    why_not: Callable[[Kind], str | None]
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

    `window`: the most keys that a query sees, its own included. Raises RuntimeError for a double
        backward.
    """
    # A window that no query reaches is no window; the plain kernels are faster.
    window = window if window and window < layout.longest_context else None
    has = window is not None, softcap is not None
    kind = Kind(q.device.type, q.dtype, q.shape[-1], *has, q.device.index)
    return choose(kind).attend(q, k, v, layout, Rule(scale, window, softcap))


@cache
def choose(kind: Kind) -> Provider:
    """The first provider that can and that passes its self-test."""
    for provider in candidates(kind):
        name = provider.name
        try:
            error = _tested(provider.attend, kind)
        except Exception as problem:  # a foreign kernel may fail in any way; there is another one
            log.warning(
                "attention kernel %s failed on %s: %s; trying the next", name, kind, problem
            )
            continue
        if error <= SELF_TEST_TOLERANCE[kind.dtype]:
            found = "packed attention on %s: %s (%.1g from the dense reference)"
            log.info(found, kind, name, error)
            return provider
        wrong = "attention kernel %s is wrong on %s: %.2g from the reference; next"
        log.warning(wrong, name, kind, error)
    raise RuntimeError(f"no attention kernel passed its self-test on {kind}")


def _tested(attention: Attention, kind: Kind) -> float:
    """`self_test` apart, on the GPU of the caller's tensors: a new thread starts on GPU 0, where
    nobody but its owner wants a context.
    """
    here: AbstractContextManager = nullcontext()
    if kind.device == "cuda":
        index = torch.cuda.current_device() if kind.gpu is None else kind.gpu
        here = torch.cuda.device(index)

    def run() -> float:
        with here:
            return self_test(attention, kind)

    return apart(run)


def candidates(kind: Kind) -> Iterator[Provider]:
    """The providers that say they can take this kind of input, best first."""
    return (provider for provider in PROVIDERS if provider.why_not(kind) is None)


def self_test(attention: Attention, kind: Kind) -> float:
    """Largest relative L2 error of output and gradients against the dense reference on a row of 43
    tokens; NaN if one is NaN.

    Two trees of three levels, down to a single token: at every distance some ancestor has no
    descendant there. A plain segment. With two query heads for each key head calls are merged; with
    eight, keys are copied.
    """
    lengths, parents = (9, 4, 5, 1, 3, 2, 7, 2, 10), (-1, -1, 0, 0, 1, 2, 2, 4, -1)
    limits = 4 if kind.has_window else None, 3.0 if kind.has_softcap else None
    rule, errors = Rule(kind.head_dim**-0.5, *limits), list[Tensor]()
    runs: list[tuple[Attention, str, torch.dtype]] = [
        (attention, kind.device, kind.dtype),
        (reference.attend, "cpu", torch.float64),
    ]
    for heads, kv_heads in ((4, 2), (8, 1)):
        generator, results = torch.Generator().manual_seed(0), []
        shapes = [(sum(lengths), n, kind.head_dim) for n in (heads, kv_heads, kv_heads, heads)]
        *inputs, grad = (torch.randn(s, generator=generator).to(kind.dtype) for s in shapes)
        for function, device, dtype in runs:
            leaves = [x.to(device, dtype).requires_grad_() for x in inputs]
            out = function(*leaves, TreeLayout.of(lengths, device, parents=parents), rule)
            gradients = torch.autograd.grad(out, leaves, grad.to(device, dtype))
            results.append([out.detach(), *gradients])
        pairs = zip(*results, strict=True)
        errors += [(x.cpu().double() - y).norm() / y.norm() for x, y in pairs]
    return float(torch.stack(errors).max())


def _flash(
    sms: range, package: str | None = None, *, head_dim: int = 256, has_softcap: bool = True
) -> Callable[[Kind], str | None]:
    """Why FlashAttention on CUDA cannot take a kind of input: a package, or torch's own."""

    def why_not(kind: Kind) -> str | None:
        if package is not None and not _is_installed(package):
            return f"{package} is not installed"
        if kind.has_softcap and not has_softcap:
            return "its backward has no softcap"
        if kind.device != "cuda":
            return "needs CUDA"
        if kind.dtype not in (torch.float16, torch.bfloat16):
            return "needs 16 bits"
        if kind.head_dim % 8 or kind.head_dim > head_dim:
            return f"needs a head size divisible by 8, at most {head_dim}"
        known = _compute_capability(kind.gpu) in sms
        return None if known else f"needs sm{sms.start} to sm{sms.stop - 1}"

    return why_not


@cache
def _compute_capability(index: int | None) -> int:
    major, minor = torch.cuda.get_device_capability(index)
    return 10 * major + minor


@cache
def _has_distribution(name: str) -> bool:
    try:
        return bool(metadata.version(name))
    except metadata.PackageNotFoundError:
        return False


def _is_installed(name: str) -> bool:
    """A module, or a distribution: FA2 and FA4 both ship a module `flash_attn`, and the names of
    their distributions tell them apart.
    """
    return _has_distribution(name) if "-" in name else util.find_spec(name) is not None


def _on_cpu(*dtypes: torch.dtype, library: str | None = None) -> Callable[[Kind], str | None]:
    """Why a CPU's kernel without windows and softcaps cannot take a kind of input."""

    def why_not(kind: Kind) -> str | None:
        if kind.device != "cpu" or kind.dtype not in dtypes:
            return f"needs a CPU and {', '.join(map(str, dtypes))}"
        if kind.has_window or kind.has_softcap:
            return "has neither window nor softcap"
        return None if library is None else loader.load(library)

    return why_not


def _partial(
    why_not: Callable[[Kind], str | None], name: str, forward: Callable, backward: Callable,
    **options: bool,
) -> Provider:  # fmt: skip
    kernel = Kernel(name, forward, backward, **options)
    return Provider(name, why_not, partial(attend, kernel=kernel))


PROVIDERS = (
    _partial(_flash(range(90, 1000), "flash-attn-4", head_dim=128, has_softcap=False),
             "fa4", cuda.fa4_forward, cuda.fa4_backward),
    _partial(_flash(range(90, 100), "flash_attn_interface"),
             "fa3", cuda.fa3_forward, cuda.fa3_backward),
    _partial(_flash(range(80, 1000), "flash-attn"), "fa2", cuda.fa2_forward, cuda.fa2_backward),
    _partial(_flash(range(80, 1000), has_softcap=False),
             "flash_aten", cuda.aten_forward, cuda.aten_backward),
    Provider("flex", lambda kind: None if kind.device == "cuda" else "needs CUDA", flex.attend),
    _partial(_on_cpu(torch.float32, library="attention"), "csrc", csrc.forward, csrc.backward),
    _partial(_on_cpu(torch.float32, torch.float64, torch.bfloat16),
             "flash_cpu", torch_cpu.forward, torch_cpu.backward, takes_copies=False),
    _partial(lambda kind: None, "explicit", explicit.forward, explicit.backward),
)  # fmt: skip
