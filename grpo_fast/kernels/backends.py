"""Which row kernels run: `resolve("auto" | "torch" | "cpu" | "triton", device)`, chosen once per device and logged."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
import os
from collections.abc import Callable
from typing import NamedTuple

import torch

logger = logging.getLogger("grpo_fast")

BACKENDS = ("auto", "torch", "cpu", "triton")
_PREFERRED = {"cpu": "cpu", "cuda": "triton"}  # kind of device → what "auto" takes where it runs


class Backend(NamedTuple):
    """The doors of one set of kernels (documented in `rows_torch`); None where it has no such kernel."""

    name: str
    row_logps: Callable
    row_grad_: Callable
    row_loss_: Callable
    linear_logps: Callable | None = None
    linear_weights: Callable | None = None
    fuses: Callable | None = None  # whether the two above are worth it for a head's weight
    stores: Callable | None = None  # the dtype of linear_weights' output for a head's weight, None: it takes none

    def for_head(self, weight: torch.Tensor) -> Backend:
        """The doors for one head: without those that start from hidden where they are not worth it."""
        if self.fuses is None or self.fuses(weight):
            return self
        return self._replace(linear_logps=None, linear_weights=None, stores=None)


def resolve(backend: str, device: torch.device) -> Backend:
    """The kernels for a backend's name on a device.

    An explicit name never falls back: it works or says why not. "auto" is csrc on the CPU where it can be built, Triton
    on a GPU, and plain torch elsewhere.

    Raises:
        ValueError: an unknown name, or a backend that cannot run here, with the reason.
    """
    if backend == "auto":
        return _auto(device.type)
    if backend == "torch":
        return _load("torch")
    reason = unavailable(backend, device.type)
    if reason:
        raise ValueError(f"backend: expected one that runs here, got {backend!r}: {reason}")
    return _load(backend)


@functools.cache
def _load(name: str) -> Backend:
    rows = importlib.import_module(f"grpo_fast.kernels.rows_{name}")
    doors = rows.row_logps, rows.row_grad_, rows.row_loss_
    if name == "torch":
        return Backend(name, *doors)
    linear = importlib.import_module(f"grpo_fast.kernels.linear_{name}")
    weights = importlib.import_module("grpo_fast.kernels.weights_triton") if name == "triton" else linear
    return Backend(name, *doors, linear.linear_logps, weights.linear_weights, linear.fuses, weights.stores)


@functools.cache
def unavailable(backend: str, device_type: str) -> str | None:
    """Why a backend cannot run on a kind of device, or None when it can."""
    if backend not in BACKENDS:
        raise ValueError(f"backend: expected one of {list(BACKENDS)}, got {backend!r}")
    if backend == "cpu":
        if device_type != "cpu":
            return f"the tensors are on {device_type}, the C++ kernels read host memory"
        from grpo_fast.kernels import csrc_loader

        return csrc_loader.load()
    if backend == "triton":
        if importlib.util.find_spec("triton") is None:
            return "the package triton is not installed"
        if device_type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
            return "the tensors are on the CPU (set TRITON_INTERPRET=1 before the first import to interpret kernels)"
    return None


@functools.cache
def fallback_reason(device_type: str) -> str | None:
    """Why "auto" is plain torch on a kind of device that has its own kernels, or None; one line."""
    from grpo_fast.kernels import csrc_loader

    preferred = _PREFERRED.get(device_type)
    reason = unavailable(preferred, device_type) if preferred else None
    return csrc_loader.one_line(f"{preferred}: {reason}") if reason else None


@functools.cache
def _auto(device_type: str) -> Backend:
    reason = fallback_reason(device_type)
    chosen = "torch" if reason else _PREFERRED.get(device_type, "torch")
    # What is wrong with the C++ kernels was told by their loader, at the level that it deserves.
    level = logging.WARNING if reason and device_type != "cpu" else logging.INFO
    because = f" ({reason})" if reason else ""
    logger.log(level, "grpo_fast: backend %s on %s%s", chosen, device_type, because)
    return _load(chosen)
