"""One benchmark problem: the tensors every provider gets, and the fp64 answer each result is verified against."""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import torch
from torch import Tensor

COMPLETIONS = 8
EPSILON = 0.2
LOGIT_STD = 2.0
ROW_BLOCK = 128


class Truth(NamedTuple):
    """The fp64 answer: loss (0-d), d hidden (N, H), d weight (V, H), and the scale a loss error is judged by."""

    loss: Tensor
    grad_hidden: Tensor
    grad_weight: Tensor
    loss_scale: float


@dataclasses.dataclass(eq=False)
class Problem:
    """A packed on-policy-like GRPO batch: 8 completions of N/8 tokens, advantages of both signs, dapo without KL.

    Every row has a gradient, so no provider saves work by skipping rows: the rows whose ratio is far from 1 (half of
    them) lie on the side of the clip that keeps its gradient, and no ratio lies near a bound, where a provider that
    rounds its logits to 16 bits would decide otherwise than fp64.
    """

    hidden: Tensor  # (N, H), requires grad
    weight: Tensor  # (V, H), requires grad
    target_ids: Tensor  # (N,) int64, drawn from the model's own softmax
    advantages: Tensor  # (B,) fp32
    old_logps: Tensor  # (N,) fp32
    cu_seqlens: Tensor  # (B + 1,) int32

    @property
    def shape(self) -> tuple[int, int, int]:
        """(N, H, V)"""
        return (*self.hidden.shape, self.weight.shape[0])

    @property
    def flops(self) -> int:
        """Of the three matrix products a loss with gradients to hidden and weight cannot do without: 6NVH."""
        n, h, v = self.shape
        return 6 * n * v * h

    @property
    def token_advantages(self) -> Tensor:
        """(N,) fp32"""
        return self.advantages.repeat_interleave(self.hidden.shape[0] // COMPLETIONS)

    @functools.cached_property
    def truth(self) -> Truth:
        """Of the dapo loss mean(-min(r·A, clip(r)·A))."""
        advantages = self.token_advantages.double()
        ratio = torch.exp(self._logps - self.old_logps.double())
        clipped = ratio.clamp(1 - EPSILON, 1 + EPSILON)
        per_token = -torch.minimum(ratio * advantages, clipped * advantages)
        slope = torch.where(ratio * advantages <= clipped * advantages, -ratio * advantages, 0.0)
        grad_hidden, grad_weight = self._gradients(slope / len(slope))
        return Truth(per_token.mean(), grad_hidden, grad_weight, float(per_token.abs().mean()))

    @functools.cached_property
    def dense_truth(self) -> Truth:
        """Of the mean cross entropy, the yardstick of the dense peers."""
        n = self.hidden.shape[0]
        slope = torch.full((n,), -1.0 / n, dtype=torch.float64, device=self.hidden.device)
        grad_hidden, grad_weight = self._gradients(slope)
        return Truth(-self._logps.mean(), grad_hidden, grad_weight, float(self._logps.abs().mean()))

    @functools.cached_property
    def _logps(self) -> Tensor:
        return exact_logps(self.hidden, self.weight, self.target_ids)

    @torch.no_grad()
    def _gradients(self, slope: Tensor) -> tuple[Tensor, Tensor]:
        weight = self.weight.double()
        grad_hidden = torch.empty_like(self.hidden, dtype=torch.float64)
        grad_weight = torch.zeros_like(weight)
        for rows in row_blocks(len(slope)):
            hidden = self.hidden[rows].double()
            grad_logits = torch.softmax(hidden @ weight.T, -1).neg_()
            grad_logits[torch.arange(len(hidden)), self.target_ids[rows]] += 1.0
            grad_logits *= slope[rows, None]
            grad_hidden[rows] = grad_logits @ weight
            grad_weight.addmm_(grad_logits.T, hidden)
        return grad_hidden, grad_weight


def make_problem(shape: tuple[int, int, int], dtype: torch.dtype, device: str = "cpu", seed: int = 0) -> Problem:
    """Random hidden states and head with logits of standard deviation 2, targets drawn from their softmax."""
    n, h, v = shape
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device=device)

    hidden = normal(n, h).to(dtype)
    weight = (normal(v, h) * (LOGIT_STD / h**0.5)).to(dtype)
    target_ids = torch.empty(n, dtype=torch.int64, device=device)
    for rows in row_blocks(n):
        probabilities = torch.softmax(hidden[rows].float() @ weight.float().T, -1)
        target_ids[rows] = torch.multinomial(probabilities, 1, generator=generator).squeeze(-1)
    sign = torch.tensor([1.0, -1.0], device=device).repeat(COMPLETIONS // 2)
    advantages = sign * (0.5 + torch.rand(COMPLETIONS, generator=generator, device=device))
    # Half of the rows on policy up to noise, half far on the side of the clip that keeps its gradient.
    far = torch.rand(n, generator=generator, device=device) < 0.5
    log_ratio = torch.where(far, -0.5 * sign.repeat_interleave(n // COMPLETIONS), 0.02 * normal(n))
    old_logps = (exact_logps(hidden, weight, target_ids) - log_ratio.double()).float()
    cu_seqlens = torch.arange(0, n + 1, n // COMPLETIONS, dtype=torch.int32, device=device)
    return Problem(hidden.requires_grad_(), weight.requires_grad_(), target_ids, advantages, old_logps, cu_seqlens)


@torch.no_grad()
def exact_logps(hidden: Tensor, weight: Tensor, target_ids: Tensor) -> Tensor:
    """fp64 log-probabilities (N,) of the targets, a block of rows at a time."""
    head = weight.double()
    logps = torch.empty(len(target_ids), dtype=torch.float64, device=hidden.device)
    for rows in row_blocks(len(target_ids)):
        logits = hidden[rows].double() @ head.T
        logps[rows] = logits.gather(-1, target_ids[rows, None]).squeeze(-1) - logits.logsumexp(-1)
    return logps


def row_blocks(n: int) -> list[slice]:
    """Blocks that keep the fp64 logits small beside the head."""
    return [slice(start, min(start + ROW_BLOCK, n)) for start in range(0, n, ROW_BLOCK)]
