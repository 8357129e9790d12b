"""Ours, the peers and the limits, by operation."""

from __future__ import annotations

import functools
import importlib.metadata

from benchmarks.providers import limits, ours, peers
from benchmarks.providers.base import Provider, Result, Step

PACKAGES = (
    "torch", "triton", "transformers", "trl", "liger-kernel", "cut-cross-entropy", "quack-kernels",
    "nvidia-cutlass-dsl", "verl", "numpy",
)  # fmt: skip


def providers_of(operation: str) -> list[Provider]:
    """The candidates of an operation, its limits first."""
    if operation == "linear_grpo_loss":
        return [*limits.gemm_limits(3), *ours.providers(ours.loss), *peers.loss_peers()]
    if operation in ("linear_logps", "linear_logps_backward"):
        gradient = operation.endswith("backward")
        make = functools.partial(ours.logps, gradient=gradient)
        return [*limits.gemm_limits(3 if gradient else 1), *ours.providers(make), *peers.logps_peers(gradient)]
    inplace = operation.endswith("inplace")
    make = functools.partial(ours.logits_loss, inplace=inplace)
    return [limits.COPY, *ours.providers(make), *peers.logits_peers(inplace)]


def versions() -> dict[str, str]:
    """Installed versions of everything compared."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


__all__ = ["PACKAGES", "Provider", "Result", "Step", "providers_of", "versions"]
