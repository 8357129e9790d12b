"""Selection of the kernels by device, dtype and shape.

This module makes all decisions about backends and kernels.

Environment:
    GRPO_FAST_LOG=1: log to stderr which kernels are selected, once per combination
    GRPO_FAST_GEMM=auto|own|vendor: use the matrix product of csrc (own) or torch (vendor) on the
        CPU; `uses_csrc_gemm` and `layers_use_csrc_gemm` document the choice of auto
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
# The backend that "auto" selects for each device type, if it is available.
PREFERRED = {"cpu": "cpu", "cuda": "triton"}
# Minimum vocabulary size for the C++ kernels that start from hidden states. For a smaller
# vocabulary, the row kernels are as fast, and need fewer Python calls because they also compute the
# loss.
FROM_HIDDEN = 2048

# Configure logging, so that GRPO_FAST_LOG=1 has an effect in a script that does not. basicConfig
# does nothing if the application has already configured logging.
if os.environ.get("GRPO_FAST_LOG", "0") not in ("", "0"):
    logging.basicConfig(format="%(message)s")
    logger.setLevel(logging.INFO)


class Kernels(NamedTuple):
    """The kernel functions of one backend.

    reference.py, cpu/rows.py and gpu/gradients.py document the functions.
    """

    row_logps: Callable[..., RowStats]
    row_grad_: Callable[..., Tensor]
    row_loss_: Callable[..., RowLoss]
    row_coefficients: Callable[..., tuple[Tensor, Tensor]] = row_coefficients
    head_logps: Callable[..., RowStats] | None = None  # computes logps from hidden states
    head_exponentials: Callable[..., Exponentials] | None = None  # the same for exponentials
    # The module gpu/gradients.py, with the kernels that run before and after the gradient GEMMs.
    # None: torch computes these steps.
    gradients: ModuleType | None = None


class Route(NamedTuple):
    """The kernels selected for one LM head or one matrix of logits.

    Attributes:
        backend: "torch", "cpu" (C++) or "triton".
        kernels: the backend's functions. `head_logps` and `head_exponentials` are None if the route
            does not use them.
        exponentials: dtype of the output of `head_exponentials`; None: logits are stored instead.
        product: implementation of the matrix products, one of "own" (csrc), "own, AMX" and "torch".
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
    """Return the route of the row kernels for a matrix of logits.

    Raises:
        ValueError: the backend cannot run here; the message gives the reason.
    """
    return _route(_resolved(backend, logits), "torch")


def head_route(backend: str, weight: Tensor, *, is_shard: bool = False) -> Route:
    """Return the route for an LM head with this weight.

    A vocabulary shard uses the row kernels. The kernels that start from hidden states divide the
    exponentials of a row by the exponential of its target, which most shards do not contain.

    Raises:
        ValueError: the backend cannot run here; the message gives the reason.
    """
    name = _resolved(backend, weight)
    is_16_bits = weight.dtype == torch.bfloat16
    is_own = uses_csrc_gemm(weight)
    product = "torch" if not is_own else "own, AMX" if gemm.uses_tiles(weight) else "own"
    if is_shard:
        return _route(name, product)
    # On a GPU, store exponentials in bf16 if the weight is bf16. bf16 exponentials are as precise
    # as bf16 d-logits. With any other dtype, store logits instead.
    if name == "triton":
        return _route(name, product, "gpu.linear", torch.bfloat16 if is_16_bits else None)
    if name == "cpu" and is_own and weight.shape[0] >= FROM_HIDDEN:
        if loader.unavailable("linear") is None:
            return _route(name, product, "cpu.rows", POSITIVE16 if is_16_bits else torch.float32)
    return _route(name, product)


@functools.cache
def kernel_module(rows: str, backend: str) -> ModuleType:
    """Return the module with a backend's kernels for `rows`, which is "support" or "divergence".

    support.py and divergence.py of this folder document the kernels. These two modules have the
    torch implementation, which is also used if the C++ library is unavailable.
    """
    name = {"cpu": "cpu.rows", "triton": f"gpu.{rows}"}.get(backend, rows)
    # This C++ library is built separately from that of the row kernels, so it may be missing even
    # if the backend is "cpu". Use torch then.
    if backend == "cpu" and loader.unavailable(rows) is not None:
        name = rows
    logger.info("grpo_fast: %s kernels are in kernels.%s", rows, name)
    return _module(name)


def uses_csrc_gemm(x: Tensor) -> bool:
    """Return whether the LM head's products with the dtype and device of x use csrc, not torch.

    They use csrc if it has a product for this dtype and CPU, unless GRPO_FAST_GEMM is "vendor". The
    reasons are:

    - In fp32, the bits of a row of the csrc product depend only on that row. With torch's MKL, they
      may also depend on the number of rows and of threads. On AMD CPUs with AVX-512, MKL does not
      use it and is slower.
    - In bf16, torch would round the product to bf16, which changes logps by 1e-2.
    """
    return x.is_cpu and gemm_choice() != "vendor" and gemm.unavailable(x.dtype) is None


def layers_use_csrc_gemm(weight: Tensor) -> bool:
    """Return whether a model's linear layers use the fp32 product of csrc instead of torch.

    By default, linear layers use torch's product on Intel CPUs, where MKL is faster.
    """
    prefers_torch = gemm_choice() == "auto" and loader.cpu_vendor() == "GenuineIntel"
    return uses_csrc_gemm(weight) and not prefers_torch


@functools.cache
def gemm_choice() -> str:
    """Return the value of GRPO_FAST_GEMM, or "auto" if the variable is not set."""
    choice = os.environ.get("GRPO_FAST_GEMM", "auto")
    if choice not in GEMMS:
        raise ValueError(f"GRPO_FAST_GEMM: expected one of {list(GEMMS)}, got {choice!r}")
    return choice


def _resolved(backend: str, x: Tensor) -> str:
    """Return the name of the backend for a tensor.

    On a CPU, "auto" selects C++ kernels if they can be built. On a GPU, it selects Triton. In all
    other cases, and always for fp64, it selects torch. A backend that the user names is never
    replaced. If it cannot run, an error is raised.
    """
    # Only the torch backend supports fp64, which is used to compute reference results.
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
    """Return a one-line reason why "auto" falls back to torch on a device type.

    The result is None if the preferred backend is available, or if the device type has none.
    """
    preferred = PREFERRED.get(device_type)
    reason = unavailable(preferred, device_type) if preferred else None
    return loader.one_line(f"{preferred}: {reason}") if reason else None


@functools.cache
def _auto(device_type: str) -> str:
    reason = fallback_reason(device_type)
    if reason:
        # On the CPU, the loader has already logged a warning.
        level = logging.INFO if device_type == "cpu" else logging.WARNING
        logger.log(level, "grpo_fast: backend torch on %s (%s)", device_type, reason)
    return "torch" if reason else PREFERRED.get(device_type, "torch")


@functools.cache
def unavailable(backend: str, device_type: str) -> str | None:
    """Return why a backend cannot run on a device type, or None if it can."""
    if backend == "cpu":
        if device_type != "cpu":
            return f"the tensors are on {device_type}, the C++ kernels read host memory"
        return loader.unavailable()
    # Search for the package without importing it, because the import takes seconds.
    if backend == "triton":
        if importlib.util.find_spec("triton") is None:
            return "the package triton is not installed"
        if device_type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
            hint = "set TRITON_INTERPRET=1 before the first import to interpret kernels"
            return f"the tensors are on the CPU ({hint})"
    return None


def uses_triton(x: Tensor, backend: str = "auto") -> bool:
    """Return whether Triton computes the small steps of a call, such as copies of its inputs."""
    is_asked = backend == "triton" or (x.is_cuda and backend == "auto")
    return is_asked and unavailable("triton", x.device.type) is None


@functools.cache
def _route(
    backend: str, product: str, from_hidden: str = "", stored: torch.dtype | None = None
) -> Route:
    """Build a route, and cache it.

    `from_hidden` is the module with the kernels that start from hidden states. If it is empty, the
    route uses row kernels only.
    """
    rows = _module({"torch": "reference", "cpu": "cpu.rows", "triton": "gpu.rows"}[backend])
    kernels = Kernels(rows.row_logps, rows.row_grad_, rows.row_loss_)
    if from_hidden:
        head = _module(from_hidden)
        kernels = kernels._replace(
            head_logps=head.head_logps, head_exponentials=head.head_exponentials
        )
    if backend == "triton":
        kernels = kernels._replace(
            row_coefficients=_module("gpu.tokens").row_coefficients,
            gradients=_module("gpu.gradients"),
        )
    route = Route(backend, kernels, stored, product)
    logger.info("grpo_fast: %s", route)
    return route


def _module(name: str) -> ModuleType:
    return importlib.import_module(f"{__package__}.{name}")
