"""Lower bounds on the time of an operation, which are called limits.

A limit is the time of the matrix products that the operation needs, or the time of a copy of its
logits.
"""

from __future__ import annotations

from functools import partial

import torch

from benchmarks.kernels.problem import Problem
from benchmarks.kernels.providers.base import Provider
from benchmarks.measure import Result, Step


def gemms(count: int, compute_dtype: torch.dtype | None, problem: Problem) -> Step:
    """Return a step that runs matrix products.

    The products write to buffers that are allocated before the timing. If the logits are too large,
    they are computed in blocks of rows.

    Args:
        count: 1 for hidden·Wᵀ, 2 to add the product for the gradient of hidden, and 3 to add the
            product for the gradient of the weight.
        compute_dtype: dtype of the products, or None for the dtype of the inputs. With float32,
            16-bit inputs are converted before the timing. Some CPUs compute fp32 products faster
            than 16-bit products.
        problem: the problem whose hidden states and weight are multiplied.
    """
    dtype = compute_dtype or problem.hidden.dtype
    hidden, weight = problem.hidden.detach().to(dtype), problem.weight.detach().to(dtype)
    n, _, v = problem.shape
    rows = min(n, max(512, 2**34 // (v * dtype.itemsize)))
    logits = torch.empty(rows, v, dtype=dtype, device=hidden.device)
    grad_logits = torch.empty_like(logits).normal_(std=1e-3) if count > 1 else logits
    grad_hidden, grad_weight = torch.empty_like(hidden), torch.empty_like(weight)

    def run() -> Result:
        for start in range(0, n, rows):
            h = hidden[start : start + rows]
            torch.mm(h, weight.T, out=logits[: len(h)])
            if count > 1:
                torch.mm(grad_logits[: len(h)], weight, out=grad_hidden[start : start + rows])
            if count > 2:
                torch.mm(grad_logits[: len(h)].T, h, out=grad_weight)
        return {}

    return Step(run)


def copy(problem: Problem) -> Step:
    """Return a step that copies the logits, which reads and writes N·V elements."""
    source = problem.logits
    target = torch.empty_like(source)

    def run() -> Result:
        target.copy_(source)
        return {}

    return Step(run)


def only_16_bit(device: str, dtype: torch.dtype) -> str | None:
    if dtype == torch.float32:
        return "the same as the limit in the dtype of the inputs"
    return None if device == "cpu" else "16-bit products are the faster ones on a GPU"


def gemm_limits(count: int) -> list[Provider]:
    name = {1: "one GEMM", 2: "two GEMMs", 3: "three GEMMs"}[count]
    return [
        Provider(name, "limit", partial(gemms, count, None)),
        Provider(f"{name}, fp32", "limit", partial(gemms, count, torch.float32), None, only_16_bit),
    ]


COPY = Provider("device copy", "limit", copy)
