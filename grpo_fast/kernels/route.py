"""Which code runs: the one place that decides, by device, dtype and shape, and says so.

Environment:
    GRPO_FAST_LOG=1                  say on stderr what runs, the first time
    GRPO_FAST_GEMM=auto|own|vendor   whose fp32 product a CPU takes (auto: see `uses_csrc_gemm`)
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
import os
from collections.abc import Callable
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from grpo_fast.kernels.cpu import gemm, loader
from grpo_fast.kernels.types import POSITIVE16, Exponentials, RowLoss, RowStats
from grpo_fast.objective.coefficients import row_coefficients

logger = logging.getLogger("grpo_fast")

BACKENDS = ("auto", "torch", "cpu", "triton")
GEMMS = ("auto", "own", "vendor")
PREFERRED = {"cpu": "cpu", "cuda": "triton"}  # kind of device → what "auto" takes where it runs
# Below this many columns the C++ row kernels, which also take the loss's leaf, are as fast as those
# that start from hidden, and take fewer Python calls.
FROM_HIDDEN = 2048

if os.environ.get("GRPO_FAST_LOG", "0") not in ("", "0"):
    logging.basicConfig(format="%(message)s")
    logger.setLevel(logging.INFO)


class Kernels(NamedTuple):
    """The kernel_module of one backend (documented in reference.py, cpu/linear.py, gpu/gradients.py)."""

    row_logps: Callable[..., RowStats]
    row_grad_: Callable[..., Tensor]
    row_loss_: Callable[..., RowLoss]
    row_coefficients: Callable[..., tuple[Tensor, Tensor]] = row_coefficients
    head_logps: Callable[..., RowStats] | None = None  # from hidden
    head_exponentials: Callable[..., Exponentials] | None = None  # from hidden
    gradients: ModuleType | None = (
        None  # module: what surrounds the gradient GEMMs of exponentials; None: torch
    )


class Route(NamedTuple):
    """The kernels that run for one head or one matrix of logits.

    Attributes:
        backend: "torch", "cpu" (C++) or "triton".
        kernels: its kernel_module; those that start from hidden are None where they are not taken.
        exponentials: dtype of what `head_exponentials` writes; None: logits are stored.
        product: whose matrix products: "own", "own, AMX", or "torch".
    """

    backend: str
    kernels: Kernels
    exponentials: torch.dtype | None
    product: str

    def __str__(self) -> str:
        way = "row kernels"
        stored = "logits"
        if self.exponentials is not None:
            stored = f"exponentials in {str(self.exponentials)[6:]}"
        if self.kernels.head_logps is not None:
            way = f"kernels from hidden, {stored} stored"
        return f"{self.backend} backend, {way}, products: {self.product}"


def rows_route(backend: str, logits: Tensor) -> Route:
    """For a matrix of given logits.

    Raises:
        ValueError: an unknown backend, or one that cannot run here, with the reason.
    """
    return _route(_resolved(backend, logits), "torch")


def head_route(backend: str, weight: Tensor, *, is_shard: bool = False) -> Route:
    """For a head with this weight; see `rows_route`.

    A shard of the vocabulary takes row kernels: those that start from hidden estimate a row's sum
    by its target's logit, which most shards do not have.
    """
    name = _resolved(backend, weight)
    is_16_bits = weight.dtype == torch.bfloat16
    is_own = uses_csrc_gemm(weight)
    product = "torch" if not is_own else "own, AMX" if gemm.uses_tiles(weight) else "own"
    if is_shard:
        return _route(name, product)
    if name == "triton":
        return _route(name, product, "gpu", torch.bfloat16 if is_16_bits else None)
    if name == "cpu" and is_own and weight.shape[0] >= FROM_HIDDEN:
        if loader.unavailable("linear") is None:
            return _route(name, product, "cpu", POSITIVE16 if is_16_bits else torch.float32)
    return _route(name, product)


@functools.cache
def kernel_module(rows: str, backend: str) -> ModuleType:
    """The module for "support", rows in a sampler's sets, or for "divergence", rows beside a
    teacher's; <rows>_reference.py documents its kernel_module.
    """
    name = {"cpu": f"cpu.{rows}", "triton": f"gpu.{rows}"}.get(backend, f"{rows}_reference")
    if backend == "cpu" and loader.unavailable(rows) is not None:
        name = f"{rows}_reference"
    logger.info("grpo_fast: rows with a %s: kernels.%s", rows, name)
    return _module(name)


def uses_csrc_gemm(x: Tensor) -> bool:
    """Whether products with x as their second operand are our own (csrc) instead of torch's.

    Through MKL torch multiplies fp32 without AVX-512 on an AMD core, which is half of a Zen 5 and
    up to nine tenths of a Zen 4 (a Zen 3 has none: there it is as fast as ours), and rounds a bf16
    product to bf16, which moves logps by 1e-2. So ours is taken for fp32 on x86 CPUs that are not
    Intel's, for bf16 wherever the CPU multiplies 16-bit numbers, and for fp32 where the user lets
    torch round its operands (medium matmul precision on AMX).
    """
    if not x.is_cpu or gemm_choice() == "vendor" or gemm.unavailable(x.dtype) is not None:
        return False
    is_intel = loader.cpu_vendor() == "GenuineIntel"
    is_vendors = x.dtype == torch.float32 and is_intel and gemm_choice() == "auto"
    return not is_vendors or gemm.vendor_rounds()


@functools.cache
def gemm_choice() -> str:
    choice = os.environ.get("GRPO_FAST_GEMM", "auto")
    if choice not in GEMMS:
        raise ValueError(f"GRPO_FAST_GEMM: expected one of {list(GEMMS)}, got {choice!r}")
    return choice


def _resolved(backend: str, x: Tensor) -> str:
    """An explicit name never falls back: it works or says why not.

    "auto" is csrc on the CPU where it can be built, Triton on a GPU, else (and for fp64) torch.
    """
    if x.dtype == torch.float64:
        if backend not in ("auto", "torch"):
            raise ValueError(f"backend: fp64 tensors expect 'auto' or 'torch', got {backend!r}")
        return "torch"
    if backend == "auto":
        return _auto(x.device.type)
    reason = unavailable(backend, x.device.type)
    if reason:
        raise ValueError(f"backend: expected one that runs here, got {backend!r}: {reason}")
    return backend


@functools.cache
def fallback_reason(device_type: str) -> str | None:
    """Why "auto" is plain torch on a kind of device that has its own kernels, or None; one line."""
    preferred = PREFERRED.get(device_type)
    reason = unavailable(preferred, device_type) if preferred else None
    return loader.one_line(f"{preferred}: {reason}") if reason else None


@functools.cache
def _auto(device_type: str) -> str:
    reason = fallback_reason(device_type)
    if reason:
        # The loader has told what is wrong with the C++ kernels, at the level that it deserves.
        level = logging.INFO if device_type == "cpu" else logging.WARNING
        logger.log(level, "grpo_fast: backend torch on %s (%s)", device_type, reason)
    return "torch" if reason else PREFERRED.get(device_type, "torch")


@functools.cache
def unavailable(backend: str, device_type: str) -> str | None:
    """Why a backend cannot run on a kind of device, or None when it can."""
    if backend not in BACKENDS:
        raise ValueError(f"backend: expected one of {list(BACKENDS)}, got {backend!r}")
    if backend == "cpu":
        if device_type != "cpu":
            return f"the tensors are on {device_type}, the C++ kernels read host memory"
        return loader.unavailable()
    if backend == "triton":
        if importlib.util.find_spec("triton") is None:
            return "the package triton is not installed"
        if device_type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
            hint = "set TRITON_INTERPRET=1 before the first import to interpret kernels"
            return f"the tensors are on the CPU ({hint})"
    return None


@functools.cache
def _route(
    backend: str, product: str, from_hidden: str = "", stored: torch.dtype | None = None
) -> Route:
    """The route with its kernel_module; `from_hidden`: the folder of the kernels that start there."""
    rows = _module({"torch": "reference", "cpu": "cpu.rows", "triton": "gpu.rows"}[backend])
    kernels = Kernels(rows.row_logps, rows.row_grad_, rows.row_loss_)
    if from_hidden:
        head = _module(f"{from_hidden}.linear")
        exponentials = _module("gpu.exponentials") if backend == "triton" else head
        kernels = kernels._replace(
            head_logps=head.head_logps, head_exponentials=exponentials.head_exponentials
        )
    if backend == "triton":
        kernels = kernels._replace(
            row_coefficients=_module("gpu.coefficients").row_coefficients,
            gradients=_module("gpu.gradients"),
        )
    route = Route(backend, kernels, stored, product)
    logger.info("grpo_fast: %s", route)
    return route


def _module(name: str) -> ModuleType:
    return importlib.import_module(f"grpo_fast.kernels.{name}")
