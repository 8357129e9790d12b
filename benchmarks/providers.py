"""Who computes the loss: ours, the peers, and the three matrix products alone as the limit.

A provider turns a `Problem` into a step: a function without arguments that runs forward and backward and returns
(loss, d hidden, d weight). All get the same tensors and are asked for the same outputs; each peer is called as its own
trainer or documentation calls it. A package that is not installed, or cannot run here, makes its provider say so:
nothing is imitated.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.problem import COMPLETIONS, EPSILON, Problem, Truth

Step = Callable[[], tuple[Tensor, Tensor, Tensor]]


class Provider(NamedTuple):
    """One candidate.

    Attributes:
        name: as printed.
        role: "ours", "peer", "dense" (cross entropy only: cannot express the coefficients of RL) or "limit".
        prepare: Problem -> Step.
        needs: the package it comes from, None for torch itself.
        why_not: device type and dtype -> why it cannot run there, or None.
    """

    name: str
    role: str
    prepare: Callable[[Problem], Step]
    needs: str | None = None
    why_not: Callable[[str, torch.dtype], str | None] = lambda device, dtype: None

    def missing(self, device: str, dtype: torch.dtype) -> str | None:
        """Why this provider cannot run here, or None."""
        if self.needs and importlib.util.find_spec(self.needs) is None:
            return f"{self.needs} is not installed"
        return self.why_not(device, dtype)

    def truth(self, problem: Problem) -> Truth | None:
        """What its result must equal; None for the limit, which computes no loss."""
        if self.role == "limit":
            return None
        return problem.dense_truth if self.role == "dense" else problem.truth


def differentiate(problem: Problem, loss_of: Callable[[], Tensor]) -> Step:
    """A step that takes gradients by autograd, fresh ones each time."""

    def step() -> tuple[Tensor, Tensor, Tensor]:
        loss = loss_of()
        grad_hidden, grad_weight = torch.autograd.grad(loss, (problem.hidden, problem.weight))
        return loss.detach(), grad_hidden, grad_weight

    return step


def dapo(logps: Tensor, old_logps: Tensor, advantages: Tensor) -> Tensor:
    """The objective in torch, for peers that stop at logps: all (N,) fp32 -> mean(-min(r·A, clip(r)·A))."""
    ratio = torch.exp(logps - old_logps)
    clipped = torch.clamp(ratio, 1 - EPSILON, 1 + EPSILON)
    return -torch.minimum(ratio * advantages, clipped * advantages).mean()


def plain_loss(hidden: Tensor, weight: Tensor, target_ids: Tensor, old_logps: Tensor, advantages: Tensor) -> Tensor:
    """What one writes first: all logits, then the loss."""
    logits = hidden @ weight.T
    logps = -F.cross_entropy(logits.float(), target_ids, reduction="none")
    return dapo(logps, old_logps, advantages)


# ---- ours ----


def ours(backend: str) -> Callable[[Problem], Step]:
    """`grpo_fast.linear_grpo_loss` with one backend."""

    def prepare(problem: Problem) -> Step:
        from grpo_fast import LossConfig, linear_grpo_loss

        config = LossConfig(loss_type="dapo", epsilon_low=EPSILON, epsilon_high=EPSILON)
        return differentiate(
            problem,
            lambda: (
                linear_grpo_loss(
                    problem.hidden,
                    problem.weight,
                    problem.target_ids,
                    problem.advantages,
                    config,
                    cu_seqlens=problem.cu_seqlens,
                    old_logps=problem.old_logps,
                    num_items_in_batch=problem.hidden.shape[0],
                    backend=backend,
                ).loss
            ),
        )

    return prepare


def our_backend_missing(backend: str) -> Callable[[str, torch.dtype], str | None]:
    """Why a backend of ours cannot run on a device."""

    def why_not(device: str, dtype: torch.dtype) -> str | None:
        from grpo_fast.kernels import backends

        return backends.unavailable(backend, device) if backend != "torch" else None

    return why_not


# ---- peers ----


def plain(problem: Problem) -> Step:
    arguments = _loss_arguments(problem)
    return differentiate(problem, lambda: plain_loss(*arguments))


def compiled(problem: Problem) -> Step:
    arguments = _loss_arguments(problem)
    loss = torch.compile(plain_loss, dynamic=False)
    return differentiate(problem, lambda: loss(*arguments))


def trl(problem: Problem) -> Step:
    """`GRPOTrainer`'s fused head (`trl.trainer.utils.add_fused_lm_head`), logps only, then the objective in torch."""
    from trl.kernels import ChunkedLogProbFunction
    from trl.trainer import utils

    hidden, weight, target_ids, old_logps, advantages = _loss_arguments(problem)
    chunk = utils._CHUNKED_LOGPROB_CHUNK_SIZE  # the trainer's own constant

    def loss() -> Tensor:
        logps = ChunkedLogProbFunction.apply(hidden, weight, None, target_ids, 1.0, chunk, None, 1.0, ())[0]
        return dapo(logps, old_logps, advantages)

    return differentiate(problem, loss)


def liger(problem: Problem) -> Step:
    """Liger's chunked loss with its own defaults (one completion per chunk, compiled), KL off."""
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    head = LigerFusedLinearGRPOLoss(
        beta=0.0, use_ref_model=False, epsilon_low=EPSILON, epsilon_high=EPSILON, loss_type="dapo"
    )
    padded = (COMPLETIONS, -1)
    hidden = problem.hidden.unflatten(0, padded)
    target_ids, old_logps = problem.target_ids.view(padded), problem.old_logps.view(padded)
    mask = torch.ones_like(old_logps)
    return differentiate(
        problem,
        lambda: head(hidden, problem.weight, target_ids, mask, problem.advantages, old_per_token_logps=old_logps)[0],
    )


def cce(problem: Problem) -> Step:
    """Cut Cross-Entropy for logps (its torch_compile implementation without a GPU), then the objective in torch."""
    from cut_cross_entropy import linear_cross_entropy

    hidden, weight, target_ids, old_logps, advantages = _loss_arguments(problem)
    implementation = "cce" if hidden.is_cuda else "torch_compile"

    def loss() -> Tensor:
        nll = linear_cross_entropy(hidden, weight, target_ids, reduction="none", impl=implementation)
        return dapo(-nll.float(), old_logps, advantages)

    return differentiate(problem, loss)


def dense(chunked: bool) -> Callable[[Problem], Step]:
    """torch's own fused linear cross entropy, mean reduction."""

    def prepare(problem: Problem) -> Step:
        options = torch.nn.LinearCrossEntropyOptions() if chunked else None
        return differentiate(
            problem,
            lambda: F.linear_cross_entropy(problem.hidden, problem.weight, problem.target_ids, options=options),
        )

    return prepare


def _loss_arguments(problem: Problem) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return problem.hidden, problem.weight, problem.target_ids, problem.old_logps, problem.token_advantages


def _needs_dense(device: str, dtype: torch.dtype) -> str | None:
    return (
        None if hasattr(F, "linear_cross_entropy") else "torch.nn.functional has no linear_cross_entropy (torch < 2.13)"
    )


# ---- the limit ----


def three_gemms(compute_dtype: torch.dtype | None) -> Callable[[Problem], Step]:
    """hidden·Wᵀ, d·W and dᵀ·hidden into buffers that are already mapped: what no loss with these gradients can beat.

    `compute_dtype` float32 converts 16-bit inputs once, outside the measurement: the limit of machines whose 16-bit
    products are slower than their fp32 ones.
    """

    def prepare(problem: Problem) -> Step:
        dtype = compute_dtype or problem.hidden.dtype
        hidden, weight = problem.hidden.detach().to(dtype), problem.weight.detach().to(dtype)
        n, _, v = problem.shape
        logits = torch.empty(n, v, dtype=dtype, device=hidden.device)
        grad_logits = torch.randn(n, v, device=hidden.device).mul_(1e-3).to(dtype)
        grad_hidden, grad_weight = torch.empty_like(hidden), torch.empty_like(weight)

        def step() -> tuple[Tensor, Tensor, Tensor]:
            torch.mm(hidden, weight.T, out=logits)
            torch.mm(grad_logits, weight, out=grad_hidden)
            torch.mm(grad_logits.T, hidden, out=grad_weight)
            return logits, grad_hidden, grad_weight

        return step

    return prepare


def _only_16_bit(device: str, dtype: torch.dtype) -> str | None:
    return "the same as three GEMMs" if dtype == torch.float32 else None


PROVIDERS: list[Provider] = [
    Provider("three GEMMs", "limit", three_gemms(None)),
    Provider("three GEMMs, fp32", "limit", three_gemms(torch.float32), why_not=_only_16_bit),
    Provider("grpo_fast (auto)", "ours", ours("auto")),
    Provider("grpo_fast (torch)", "ours", ours("torch"), why_not=our_backend_missing("torch")),
    Provider("plain torch", "peer", plain),
    Provider("torch.compile", "peer", compiled),
    Provider("TRL", "peer", trl, needs="trl"),
    Provider("Liger", "peer", liger, needs="liger_kernel"),
    Provider("CCE", "peer", cce, needs="cut_cross_entropy"),
    Provider("F.linear_cross_entropy", "dense", dense(chunked=False), why_not=_needs_dense),
    Provider("F.linear_cross_entropy, chunked", "dense", dense(chunked=True), why_not=_needs_dense),
]

PACKAGES = ("torch", "triton", "transformers", "trl", "liger-kernel", "cut-cross-entropy", "numpy")


def versions() -> dict[str, str]:
    """Installed versions of everything compared."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found
