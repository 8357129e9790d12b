"""Providers, which are the implementations that a benchmark runs: grpo_fast, peers and limits."""

from __future__ import annotations

from functools import partial

from benchmarks.kernels.problem import Problem
from benchmarks.kernels.providers import limits, ours, peers
from benchmarks.kernels.providers.base import Provider
from benchmarks.measure import Step


def providers_of(operation: str) -> list[Provider]:
    """Return the providers of an operation: its limits, grpo_fast and other libraries."""
    if operation == "linear_grpo_loss":
        return [*limits.gemm_limits(3), *ours.providers(ours.loss), *peers.loss_peers()]
    if operation == "linear_grpo_loss_frozen":
        found = [*limits.gemm_limits(2), *ours.providers(ours.loss), *peers.loss_peers()]
        return [x._replace(prepare=partial(frozen, x)) for x in found]
    if operation == "linear_cross_entropy":
        ours_ = ours.providers(ours.cross_entropy)
        return [*limits.gemm_limits(3), *ours_, *peers.cross_entropy_peers()]
    if operation in ("linear_logps", "linear_logps_backward"):
        gradient = operation.endswith("backward")
        found = limits.gemm_limits(3 if gradient else 1)
        found += ours.providers(ours.logps, gradient=gradient)
        return found + peers.logps_peers(gradient)
    inplace = operation.endswith("inplace")
    found = ours.providers(ours.logits_loss, inplace=inplace)
    return [limits.COPY, *found, *peers.logits_peers(inplace)]


def frozen(provider: Provider, problem: Problem) -> Step:
    """Return the step of a provider for a weight that does not require grad."""
    return provider.prepare(problem.frozen)
