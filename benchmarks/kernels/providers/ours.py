"""Providers that run grpo_fast, one for each backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.kernels.problem import EPSILON, Problem, spread
from benchmarks.kernels.providers.base import (
    Provider,
    differentiate,
    differentiate_logits,
    differentiate_logps,
    without_gradient,
)
from benchmarks.kernels.shapes import COMPLETIONS
from benchmarks.measure import Step

BACKENDS = ("auto", "torch", "cpu", "triton")


def unavailable(backend: str) -> Callable[[str, torch.dtype], str | None]:
    """Return the `why_not` function (see `Provider`) of the providers that use a backend."""

    def why_not(device: str, dtype: torch.dtype) -> str | None:
        from grpo_fast.kernels import route as backends

        if backend == "triton" and device == "cpu":
            return "its kernels need a GPU"
        return backends.unavailable(backend, device) if backend not in ("auto", "torch") else None

    return why_not


def config() -> Any:
    from grpo_fast import LossConfig

    return LossConfig(loss_type="dapo", epsilon_low=EPSILON, epsilon_high=EPSILON)


def loss(backend: str) -> Callable[[Problem], Step]:
    """Return the `prepare` function (see `Provider`) of `linear_grpo_loss` with its backward."""

    def prepare(problem: Problem) -> Step:
        from grpo_fast import linear_grpo_loss

        chosen, mask = config(), problem.mask_or_none
        return differentiate(
            problem,
            lambda: linear_grpo_loss(
                problem.hidden, problem.weight, problem.target_ids, problem.advantages, chosen,
                completion_mask=mask, cu_seqlens=problem.cu_seqlens, old_logps=problem.old_logps,
                num_items_in_batch=problem.count, backend=backend,
            ).loss,
        )  # fmt: skip

    return prepare


def logps(backend: str, gradient: bool) -> Callable[[Problem], Step]:
    """Return the `prepare` function (see `Provider`) of `linear_logps`.

    Masked rows get the target id -100.
    """

    def prepare(problem: Problem) -> Step:
        from grpo_fast import linear_logps

        targets = problem.target_ids
        if problem.mask_or_none is not None:
            targets = targets.masked_fill(~problem.mask_or_none, -100)

        def call() -> torch.Tensor:
            return linear_logps(problem.hidden, problem.weight, targets, backend=backend)

        return differentiate_logps(problem, call) if gradient else without_gradient(call)

    return prepare


def logits_loss(backend: str, inplace: bool) -> Callable[[Problem], Step]:
    """Return the `prepare` function (see `Provider`) of `logits_grpo_loss` on (B, L + 1, V).

    The unused last row of each completion is masked.
    """

    def prepare(problem: Problem) -> Step:
        from grpo_fast import logits_grpo_loss

        chosen, shape = config(), (COMPLETIONS, -1)
        targets, old_logps, mask = (
            spread(x).view(shape)
            for x in (problem.target_ids, problem.old_logps, problem.mask.bool())
        )

        def loss_of(logits: torch.Tensor) -> torch.Tensor:
            return logits_grpo_loss(
                logits, targets, problem.advantages, chosen, completion_mask=mask,
                old_logps=old_logps, num_items_in_batch=problem.count, backend=backend,
                inplace=inplace,
            ).loss  # fmt: skip

        return differentiate_logits(problem, loss_of, inplace)

    return prepare


def providers(
    make: Callable[[str], Callable[[Problem], Step]], chosen: tuple[str, ...] = BACKENDS
) -> list[Provider]:
    """Return one provider for each backend. Its `prepare` function is `make(backend)`."""
    return [
        Provider(f"grpo_fast ({name})", "ours", make(name), why_not=unavailable(name))
        for name in chosen
    ]
