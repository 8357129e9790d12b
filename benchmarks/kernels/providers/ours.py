"""Providers that run grpo_fast, one for each backend."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from benchmarks.kernels.problem import EPSILON, Problem, spread
from benchmarks.kernels.providers import base
from benchmarks.kernels.shapes import COMPLETIONS
from benchmarks.measure import Step
from grpo_fast import LossConfig, linear_grpo_loss, linear_logps, logits_grpo_loss
from grpo_fast.kernels import route

BACKENDS = ("auto", "torch", "cpu", "triton")
CONFIG = LossConfig(loss_type="dapo", epsilon_low=EPSILON, epsilon_high=EPSILON)


def why_not(backend: str, device: str, dtype: torch.dtype) -> str | None:
    if backend == "triton" and device == "cpu":
        return "its kernels need a GPU"
    return route.unavailable(backend, device) if backend not in ("auto", "torch") else None


def loss(problem: Problem, backend: str) -> Step:
    """Return a step that runs `linear_grpo_loss` and its backward pass."""
    mask = problem.mask_or_none
    return base.differentiate(
        problem,
        lambda: linear_grpo_loss(
            problem.hidden, problem.weight, problem.target_ids, problem.advantages, CONFIG,
            completion_mask=mask, cu_seqlens=problem.cu_seqlens, old_logps=problem.old_logps,
            num_items_in_batch=problem.count, backend=backend,
        ).loss,
    )  # fmt: skip


def logps(problem: Problem, backend: str, gradient: bool) -> Step:
    """Return a step that runs `linear_logps`. Masked rows get the target id -100."""
    targets = problem.labels
    return base.logps_step(
        problem,
        lambda: linear_logps(problem.hidden, problem.weight, targets, backend=backend),
        gradient,
    )


def cross_entropy(problem: Problem, backend: str) -> Step:
    """Return a step that computes a cross entropy from `linear_logps`, and its gradients."""
    inputs = (problem.hidden, problem.weight, problem.labels)
    return base.differentiate(
        problem, lambda: base.mean_nll(linear_logps(*inputs, backend=backend), problem)
    )


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

    return base.differentiate_logits(problem, loss_of, inplace)


def providers(prepare: Callable[..., Step], **options: bool) -> list[base.Provider]:
    """Return one provider for each backend. It calls `prepare` with the backend and `options`."""
    return [
        base.Provider(
            f"grpo_fast ({name})", "ours", partial(prepare, backend=name, **options),
            why_not=partial(why_not, name),
        )
        for name in BACKENDS
    ]  # fmt: skip
