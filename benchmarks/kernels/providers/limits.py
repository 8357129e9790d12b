"""What no implementation can beat on this machine: the bare matrix products, the bare copy."""

from __future__ import annotations

from collections.abc import Callable

import torch

from benchmarks.kernels.problem import Problem
from benchmarks.kernels.providers.base import Provider
from benchmarks.measure import Result, Step


def gemms(count: int, compute_dtype: torch.dtype | None) -> Callable[[Problem], Step]:
    """hidden·Wᵀ (for three, d·W and dᵀ·hidden) into mapped buffers, by the vendor's library.

    A block of rows at a time where N·V would not fit. `compute_dtype` float32 converts 16-bit
    inputs once, outside the measurement: the limit of machines whose 16-bit products are slower
    than their fp32 ones.
    """

    def prepare(problem: Problem) -> Step:
        dtype = compute_dtype or problem.hidden.dtype
        hidden, weight = problem.hidden.detach().to(dtype), problem.weight.detach().to(dtype)
        n, _, v = problem.shape
        rows = min(n, max(512, 2**34 // (v * dtype.itemsize)))
        logits = torch.empty(rows, v, dtype=dtype, device=hidden.device)
        grad_logits = torch.empty_like(logits).normal_(std=1e-3) if count == 3 else logits
        grad_hidden, grad_weight = torch.empty_like(hidden), torch.empty_like(weight)

        def run() -> Result:
            for start in range(0, n, rows):
                h = hidden[start : start + rows]
                torch.mm(h, weight.T, out=logits[: len(h)])
                if count == 3:
                    torch.mm(grad_logits[: len(h)], weight, out=grad_hidden[start : start + rows])
                    torch.mm(grad_logits[: len(h)].T, h, out=grad_weight)
            return {}

        return Step(run)

    return prepare


def copy(problem: Problem) -> Step:
    """One read and one write of the logits."""
    source = problem.logits
    target = torch.empty_like(source)

    def run() -> Result:
        target.copy_(source)
        return {}

    return Step(run)


def only_16_bit(device: str, dtype: torch.dtype) -> str | None:
    if dtype == torch.float32:
        return "the same as the other limit"
    return None if device == "cpu" else "16-bit products are the faster ones on a GPU"


def gemm_limits(count: int) -> list[Provider]:
    name = {1: "one GEMM", 3: "three GEMMs"}[count]
    return [
        Provider(name, "limit", gemms(count, None)),
        Provider(f"{name}, fp32", "limit", gemms(count, torch.float32), why_not=only_16_bit),
    ]


COPY = Provider("device copy", "limit", copy)
