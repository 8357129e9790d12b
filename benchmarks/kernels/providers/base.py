"""Class of the providers, and functions that build their steps."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.kernels.problem import EPSILON, Problem
from benchmarks.kernels.shapes import Shape
from benchmarks.measure import Result, Step

GIB = 2**30


def free_bytes(device: str) -> int:
    if device == "cuda":
        return torch.cuda.mem_get_info()[0]
    lines = Path("/proc/meminfo").read_text().splitlines()
    line = next(line for line in lines if line.startswith("MemAvailable"))
    return int(line.split()[1]) * 1024


def runs_anywhere(device: str, dtype: torch.dtype) -> str | None:
    return None


class Provider(NamedTuple):
    """An implementation of an operation, which a benchmark measures.

    Attributes:
        name: name in the tables.
        role: "ours" (grpo_fast), "peer" (a different library) or "limit".
        prepare: function that returns the `Step` of a `Problem`.
        needs: package that the provider imports, or None.
        why_not: function of a device type and a dtype. It returns the reason why the provider
            cannot run, or None if it can.
        wide_logits: number of fp32 buffers of N·V elements that the provider has in memory at the
            same time. The provider is skipped if they do not fit.
    """

    name: str
    role: str
    prepare: Callable[[Problem], Step]
    needs: str | None = None
    why_not: Callable[[str, torch.dtype], str | None] = runs_anywhere
    wide_logits: float = 0.0

    def missing(self, device: str, dtype: torch.dtype, shape: Shape | None = None) -> str | None:
        """Return the reason why the provider cannot run, or None if it can.

        With a shape, the free memory is checked, too.
        """
        if self.needs and importlib.util.find_spec(self.needs) is None:
            return f"{self.needs} is not installed"
        reason = self.why_not(device, dtype)
        if reason or shape is None:
            return reason
        needed = self.wide_logits * 4 * shape.n * shape.v
        free = free_bytes(device)
        if needed <= 0.9 * free:
            return None
        return f"needs about {needed / GIB:.0f} GiB for its logits, {free / GIB:.0f} GiB are free"


def differentiate(problem: Problem, loss_of: Callable[[], Tensor]) -> Step:
    """Return a step that computes a loss and its gradients.

    The gradients are those with respect to hidden and, if it requires grad, the weight.
    """
    inputs = {"grad_hidden": problem.hidden}
    if problem.weight.requires_grad:
        inputs["grad_weight"] = problem.weight

    def run() -> Result:
        loss = loss_of()
        gradients = torch.autograd.grad(loss, list(inputs.values()))
        return {"loss": loss.detach(), **dict(zip(inputs, gradients, strict=True))}

    return Step(run)


def logps_step(problem: Problem, logps_of: Callable[[], Tensor], gradient: bool) -> Step:
    """Return a step that computes logps.

    If `gradient` is True, the step back-propagates `problem.grad_logps` through the logps.
    """

    def without_gradient() -> Result:
        with torch.no_grad():
            return {"logps": logps_of()}

    if not gradient:
        return Step(without_gradient)
    upstream = problem.grad_logps

    def run() -> Result:
        logps = logps_of()
        inputs = (problem.hidden, problem.weight)
        gradients = torch.autograd.grad(logps, inputs, upstream.to(logps.dtype))
        return {"logps": logps.detach(), "grad_hidden": gradients[0], "grad_weight": gradients[1]}

    return Step(run)


def differentiate_logits(
    problem: Problem, loss_of: Callable[[Tensor], Tensor], inplace: bool = False
) -> Step:
    """Return a step that computes a loss and its gradient with respect to the logits (B, L + 1, V).

    With `inplace`, the loss writes the gradient over the logits. The logits are then restored
    before each call.
    """
    buffer = problem.logits.clone() if inplace else problem.logits

    def run() -> Result:
        logits = buffer.detach().requires_grad_()
        loss = loss_of(logits)
        (gradient,) = torch.autograd.grad(loss, logits)
        return {"loss": loss.detach(), "grad_logits": gradient.flatten(0, 1)}

    if not inplace:
        return Step(run)
    return Step(run, lambda: buffer.copy_(problem.logits), buffer.nbytes)


def dapo(logps: Tensor, old_logps: Tensor, advantages: Tensor, mask: Tensor, count: int) -> Tensor:
    """Return the loss "dapo" of logps (N,): Σ mask·(-min(r·A, clip(r)·A)) / count.

    Libraries that only compute logps use this loss. `count` is the number of active tokens.
    """
    ratio = torch.exp(logps - old_logps)
    clipped = torch.clamp(ratio, 1 - EPSILON, 1 + EPSILON)
    return -(torch.minimum(ratio * advantages, clipped * advantages) * mask).sum() / count


def mean_nll(logps: Tensor, problem: Problem) -> Tensor:
    """Return the mean cross entropy of the unmasked tokens, given their logps (N,)."""
    return -(logps * problem.mask).sum() / problem.count


def dapo_arguments(problem: Problem) -> tuple[Tensor, Tensor, Tensor, int]:
    return problem.old_logps, problem.token_advantages, problem.mask, problem.count
