"""Backend selection by device, dtype and shape. All decisions about which kernels run are made
here.

Environment:
    GRPO_FAST_LOG=1: log to stderr which kernels run, once for each choice
    GRPO_FAST_GEMM=auto|own|vendor: fp32 GEMM on the CPU: csrc (own) or torch (vendor); see
        `uses_csrc_gemm` for auto
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
# Device type → the backend that "auto" selects if it is available.
PREFERRED = {"cpu": "cpu", "cuda": "triton"}
# For smaller vocabularies the C++ row kernels, which also compute the loss, are as fast as the
# kernels that start from hidden states, and they need fewer Python calls.
FROM_HIDDEN = 2048

# basicConfig does nothing if the application has configured logging.
if os.environ.get("GRPO_FAST_LOG", "0") not in ("", "0"):
    logging.basicConfig(format="%(message)s")
    logger.setLevel(logging.INFO)


class Kernels(NamedTuple):
    """The kernel functions of one backend.

    reference.py, cpu/linear.py and gpu/gradients.py document them.
    """

    row_logps: Callable[..., RowStats]
    row_grad_: Callable[..., Tensor]
    row_loss_: Callable[..., RowLoss]
    row_coefficients: Callable[..., tuple[Tensor, Tensor]] = row_coefficients
    head_logps: Callable[..., RowStats] | None = None  # computes logps from hidden states
    head_exponentials: Callable[..., Exponentials] | None = None  # the same for exponentials
    # The module gpu/gradients.py, or None if torch computes these steps.
    gradients: ModuleType | None = None


class Route(NamedTuple):
    """The kernels selected for one LM head or one matrix of logits.

    Attributes:
        backend: "torch", "cpu" (C++) or "triton".
        kernels: the backend's functions; those that start from hidden are None if not selected.
        exponentials: dtype of the output of `head_exponentials`; None: logits are stored instead.
        product: implementation of the matrix products: "own" (csrc), "own, AMX", or "torch".
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
    """Return the route for a matrix of given logits.

    Raises:
        ValueError: the backend is unknown or cannot run here; the message gives the reason.
    """
    return _route(_resolved(backend, logits), "torch")


def head_route(backend: str, weight: Tensor, *, is_shard: bool = False) -> Route:
    """Return the route for an LM head with this weight.

    A vocabulary shard uses row kernels. The kernels that start from hidden states estimate a row's
    sum from the logit of its target, which most shards do not contain.

    Raises:
        ValueError: the backend is unknown or cannot run here; the message gives the reason.
    """
    name = _resolved(backend, weight)
    is_16_bits = weight.dtype == torch.bfloat16
    is_own = uses_csrc_gemm(weight)
    product = "torch" if not is_own else "own, AMX" if gemm.uses_tiles(weight) else "own"
    if is_shard:
        return _route(name, product)
    # bf16 exponentials are as precise as bf16 d-logits. For fp32 and fp16 the kernels store logits
    # instead.
    if name == "triton":
        return _route(name, product, "gpu", torch.bfloat16 if is_16_bits else None)
    if name == "cpu" and is_own and weight.shape[0] >= FROM_HIDDEN:
        if loader.unavailable("linear") is None:
            return _route(name, product, "cpu", POSITIVE16 if is_16_bits else torch.float32)
    return _route(name, product)


@functools.cache
def kernel_module(rows: str, backend: str) -> ModuleType:
    """Return the module with the "support" or "divergence" kernels of a backend.

    The modules support_reference.py and divergence_reference.py document the functions. They are
    also used if the C++ library is unavailable.
    """
    name = {"cpu": f"cpu.{rows}", "triton": f"gpu.{rows}"}.get(backend, f"{rows}_reference")
    # The libraries build separately, so one may be missing while the row kernels exist.
    if backend == "cpu" and loader.unavailable(rows) is not None:
        name = f"{rows}_reference"
    logger.info("grpo_fast: %s kernels are in kernels.%s", rows, name)
    return _module(name)


def uses_csrc_gemm(x: Tensor) -> bool:
    """Return whether products with x as second operand use csrc instead of torch.

    Through MKL, torch multiplies fp32 on AMD CPUs without AVX-512. This reaches half of the speed
    of csrc on a Zen 5 and up to nine tenths on a Zen 4; a Zen 3 has no AVX-512 and is equally fast.
    Torch also rounds bf16 products to bf16, which moves logps by 1e-2. Therefore csrc is used for
    fp32 on x86 CPUs not made by Intel, for bf16 if the CPU has 16-bit products, and for fp32 if the
    user allows torch to round operands (medium matmul precision on AMX).
    """
    if not x.is_cpu or gemm_choice() == "vendor" or gemm.unavailable(x.dtype) is not None:
        return False
    is_intel = loader.cpu_vendor() == "GenuineIntel"
    # On Intel CPUs MKL uses AVX-512, so auto keeps torch's fp32 product.
    is_vendors = x.dtype == torch.float32 and is_intel and gemm_choice() == "auto"
    return not is_vendors or gemm.vendor_rounds()


@functools.cache
def gemm_choice() -> str:
    """Return the value of GRPO_FAST_GEMM."""
    choice = os.environ.get("GRPO_FAST_GEMM", "auto")
    if choice not in GEMMS:
        raise ValueError(f"GRPO_FAST_GEMM: expected one of {list(GEMMS)}, got {choice!r}")
    return choice


def _resolved(backend: str, x: Tensor) -> str:
    """Return the backend for a tensor. An explicit name is used or an error is raised.

    "auto" selects csrc on the CPU if it can be built, Triton on a GPU, and torch otherwise and for
    fp64.
    """
    # fp64 is for reference results; no kernel supports it.
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
    """Return why "auto" uses torch on a device type that has its own kernels, in one line,
    or None.
    """
    preferred = PREFERRED.get(device_type)
    reason = unavailable(preferred, device_type) if preferred else None
    return loader.one_line(f"{preferred}: {reason}") if reason else None


@functools.cache
def _auto(device_type: str) -> str:
    reason = fallback_reason(device_type)
    if reason:
        # The loader has already logged why the C++ kernels are missing, at the appropriate level.
        level = logging.INFO if device_type == "cpu" else logging.WARNING
        logger.log(level, "grpo_fast: backend torch on %s (%s)", device_type, reason)
    return "torch" if reason else PREFERRED.get(device_type, "torch")


@functools.cache
def unavailable(backend: str, device_type: str) -> str | None:
    """Return why a backend cannot run on a device type, or None if it can."""
    if backend not in BACKENDS:
        raise ValueError(f"backend: expected one of {list(BACKENDS)}, got {backend!r}")
    if backend == "cpu":
        if device_type != "cpu":
            return f"the tensors are on {device_type}, the C++ kernels read host memory"
        return loader.unavailable()
    # Import Triton modules only here: the package need not be installed.
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
    """Build the route. `from_hidden` names the folder of the kernels that start from hidden
    states.
    """
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
    return importlib.import_module(f"{__package__}.{name}")
