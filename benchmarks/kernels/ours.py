"""Class of the providers, the limits of the hardware, and the providers that run grpo_fast.

A provider is an implementation of an operation. A limit is the time of the matrix products that the
operation needs, or the time of a copy of its logits.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.kernels.problem import EPSILON, Problem, spread
from benchmarks.kernels.shapes import COMPLETIONS
from benchmarks.measure import Result, Step
from grpo_fast import LossConfig, Support, linear_grpo_loss, linear_logps, logits_grpo_loss
from grpo_fast.kernels import route


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
    """

    name: str
    role: str
    prepare: Callable[[Problem], Step]
    needs: str | None = None
    why_not: Callable[[str, torch.dtype], str | None] = runs_anywhere

    def missing(self, device: str, dtype: torch.dtype) -> str | None:
        """Return the reason why the provider cannot run, or None if it can."""
        if self.needs and importlib.util.find_spec(self.needs) is None:
            return f"{self.needs} is not installed"
        return self.why_not(device, dtype)


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


# ---- limits ----
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
    return None if device == "cpu" else "on a GPU, 16-bit products are faster"


def gemm_limits(count: int) -> list[Provider]:
    name = {1: "one GEMM", 2: "two GEMMs", 3: "three GEMMs"}[count]
    return [
        Provider(name, "limit", partial(gemms, count, None)),
        Provider(f"{name}, fp32", "limit", partial(gemms, count, torch.float32), None, only_16_bit),
    ]


COPY = Provider("device copy", "limit", copy)


# ---- grpo_fast ----
BACKENDS = ("auto", "torch", "cpu", "triton")
CONFIG = LossConfig(loss_type="dapo", epsilon_low=EPSILON, epsilon_high=EPSILON)


def why_not(backend: str, device: str, dtype: torch.dtype) -> str | None:
    if backend == "triton" and device == "cpu":
        return "its kernels need a GPU"
    return route.unavailable(backend, device) if backend not in ("auto", "torch") else None


def support_of(problem: Problem) -> Support | None:
    ids = problem.support_ids
    if ids is None:
        return None
    return Support(ids.flatten(), torch.arange(len(ids) + 1, device=ids.device) * ids.shape[1])


def loss(problem: Problem, backend: str) -> Step:
    """Return a step that runs `linear_grpo_loss` and its backward pass."""
    mask, support = problem.mask_or_none, support_of(problem)
    return differentiate(
        problem,
        lambda: linear_grpo_loss(
            problem.hidden, problem.weight, problem.target_ids, problem.advantages, CONFIG,
            completion_mask=mask, cu_seqlens=problem.cu_seqlens, old_logps=problem.old_logps,
            num_items_in_batch=problem.count, backend=backend, support=support,
        ).loss,
    )  # fmt: skip


def logps(problem: Problem, backend: str, gradient: bool) -> Step:
    """Return a step that runs `linear_logps`. Masked rows get the target id -100."""
    inputs = (problem.hidden, problem.weight, problem.labels)
    support = support_of(problem)
    return logps_step(
        problem, lambda: linear_logps(*inputs, backend=backend, support=support), gradient
    )


def cross_entropy(problem: Problem, backend: str) -> Step:
    """Return a step that computes a cross entropy from `linear_logps`, and its gradients."""
    inputs = (problem.hidden, problem.weight, problem.labels)
    options: dict[str, Any] = {"backend": backend, "support": support_of(problem)}
    return differentiate(problem, lambda: mean_nll(linear_logps(*inputs, **options), problem))


def logits_loss(problem: Problem, backend: str, inplace: bool) -> Step:
    """Return a step that runs `logits_grpo_loss` on logits (B, L + 1, V).

    The unused last row of each completion is masked.
    """
    shape = (COMPLETIONS, -1)
    targets, old_logps, mask = (
        spread(x).view(shape) for x in (problem.target_ids, problem.old_logps, problem.mask.bool())
    )

    def loss_of(logits: torch.Tensor) -> torch.Tensor:
        return logits_grpo_loss(
            logits, targets, problem.advantages, CONFIG, completion_mask=mask,
            old_logps=old_logps, num_items_in_batch=problem.count, backend=backend,
            inplace=inplace,
        ).loss  # fmt: skip

    return differentiate_logits(problem, loss_of, inplace)


def providers(prepare: Callable[..., Step], **options: bool) -> list[Provider]:
    """Return one provider for each backend. It calls `prepare` with the backend and `options`."""
    return [
        Provider(
            f"grpo_fast ({name})", "ours", partial(prepare, backend=name, **options),
            why_not=partial(why_not, name),
        )
        for name in BACKENDS
    ]  # fmt: skip
