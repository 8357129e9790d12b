"""Exact results in plain torch, computed in fp64."""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

# Largest allowed error of the loss and of a gradient. A result with a larger error is wrong, and is
# not timed. In fp32, rounding causes errors of about 1e-6, so an error above 1e-4 is a bug or
# comes from a lower precision. The limit for bf16 admits peers that round their logits to bf16,
# which changes the probabilities by about 1%. The tables show their errors.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
# Largest allowed absolute error of a logp in nats. For comparison: rounding a logit of about 16 to
# bf16 changes it by up to 0.06.
LOGP_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.15, torch.float16: 0.02}
# The same limits for grpo_fast, which does not round the logits. One wrong row among 8192 rows with
# equal norms changes a gradient by 1e-2, which TOLERANCE would admit in bf16.
OUR_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 6e-3, torch.float16: 2e-3}
OUR_LOGP_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 1e-3, torch.float16: 1e-3}


def logps_bar(hidden: int, device: str) -> float:
    """Return the largest allowed error of an fp32 log-probability, in nats.

    The tensor cores of a GPU truncate the accumulator after every 16 products. These errors have
    the same sign, so the total error grows with the hidden size.
    """
    return 1e-5 + (2e-8 * hidden if device == "cuda" else 0.0)


@dataclasses.dataclass(frozen=True)
class Truth:
    """Exact values with which the results of a provider are compared.

    Attributes:
        values: the exact values, with the same keys as in a `Result`.
        loss_scale: mean absolute loss of a token, by which the error of the loss is divided.
        mask: (N,) 1 for the tokens whose logps are compared, 0 for all other tokens.
    """

    values: dict[str, Tensor]
    loss_scale: float = 1.0
    mask: Tensor | None = None

    def errors(self, result: dict[str, Tensor]) -> dict[str, float]:
        """Return the error of each value of a result. The error of a missing value is infinite.

        The error of the loss is its absolute error divided by `loss_scale`. The error of the logps
        is the largest absolute error. The error of a gradient is its relative L2 error.
        """
        return {name: self._error(name, x, result.get(name)) for name, x in self.values.items()}

    def _error(self, name: str, value: Tensor, found: Tensor | None) -> float:
        if found is None:
            return float("inf")
        if name == "loss":
            return abs(float(found) - float(value)) / self.loss_scale
        if name == "logps":
            assert self.mask is not None
            return float((found.to(value.dtype) - value)[self.mask > 0].abs().max())
        return relative_l2(found, value)


def bars_of(role: str, dtype: torch.dtype) -> tuple[float, float]:
    """Return the largest allowed errors of gradients and of logps, for the role of a provider."""
    pair = (OUR_TOLERANCE, OUR_LOGP_TOLERANCE) if role == "ours" else (TOLERANCE, LOGP_TOLERANCE)
    return pair[0][dtype], pair[1][dtype]


def acceptable(errors: dict[str, float], bars: tuple[float, float]) -> bool:
    """Return True if no error is above its bar, see `bars_of`. NaN is never accurate."""
    return all(error <= bars[name == "logps"] for name, error in errors.items())


def relative_l2(value: Tensor, exact: Tensor) -> float:
    """Return the relative L2 error ‖value − exact‖ / ‖exact‖.

    It is infinite if the shapes differ or if an element is NaN, which `max` of errors could hide.
    """
    if value.shape != exact.shape:
        return float("inf")
    difference = total = 0.0
    for rows in blocks(exact):
        truth = exact[rows].double()
        difference += float((value[rows].double() - truth).square().sum())
        total += float(truth.square().sum())
    if math.isnan(difference):
        return math.inf
    return (difference / total) ** 0.5 if total else (0.0 if difference == 0 else math.inf)


def blocks(rows: Tensor) -> list[slice]:
    """Split the rows of a tensor into blocks, to save memory."""
    size = 1024 if rows.is_cuda else 128
    return [slice(start, start + size) for start in range(0, len(rows), size)]


@torch.no_grad()
def draw(hidden: Tensor, weight: Tensor, generator: torch.Generator) -> Tensor:
    """Sample one token id for each row from the softmax of hidden · weightᵀ. Return (N,) int64."""
    target_ids = torch.empty(len(hidden), dtype=torch.int64, device=hidden.device)
    for rows in blocks(hidden):
        probabilities = torch.softmax(hidden[rows].float() @ weight.float().T, -1)
        target_ids[rows] = torch.multinomial(probabilities, 1, generator=generator).squeeze(-1)
    return target_ids


def logits_of(hidden: Tensor, head: Tensor, support: Tensor | None) -> Tensor:
    """Return the logits of some rows, (rows, V). Logits outside of a row's support are -inf.

    Args:
        hidden: (rows, H) hidden states.
        head: (V, H) weight of the LM head.
        support: (rows, K) ids, or None for all ids.
    """
    logits = hidden @ head.T
    if support is None:
        return logits
    is_outside = torch.ones_like(logits, dtype=torch.bool).scatter_(1, support, False)
    return logits.masked_fill_(is_outside, -math.inf)


@torch.no_grad()
def logps(
    hidden: Tensor, weight: Tensor, target_ids: Tensor, support: Tensor | None = None
) -> Tensor:
    """Return the exact log-probabilities of the targets, (N,) in fp64.

    They are normalised over the ids in `support`, (N, K), or over all ids.
    """
    head = weight.double()
    found = torch.empty(len(target_ids), dtype=torch.float64, device=hidden.device)
    for rows in blocks(target_ids):
        logits = logits_of(hidden[rows].double(), head, None if support is None else support[rows])
        found[rows] = logits.gather(-1, target_ids[rows, None]).squeeze(-1) - logits.logsumexp(-1)
    return found


@torch.no_grad()
def logits_gradient(logits: Tensor, target_ids: Tensor, lse: Tensor, slope: Tensor) -> Tensor:
    """Return the gradient of Σ slope·logp with respect to logits (R, V), rounded to fp32.

    `target_ids`, `lse` and `slope` have shape (R,). The gradient is computed in the dtype of `lse`.
    """
    gradient = torch.empty_like(logits, dtype=torch.float32)
    for rows in blocks(logits):
        block = torch.exp(logits[rows].to(lse.dtype) - lse[rows, None]).neg_()
        block[torch.arange(len(block)), target_ids[rows]] += 1.0
        gradient[rows] = (block * slope[rows, None]).float()
    return gradient


def dapo(
    logps: Tensor, old_logps: Tensor, advantages: Tensor, mask: Tensor, epsilon: float
) -> tuple[Tensor, Tensor, float]:
    """Compute the loss "dapo": Σ mask·(-min(r·A, clip(r)·A)) / Σ mask, with the ratio r.

    Returns:
        The loss, its gradient with respect to the logps (N,), and the mean absolute loss of a
        token.
    """
    advantages = advantages.to(logps.dtype)
    mask = mask.to(logps.dtype)
    ratio = torch.exp(logps - old_logps.to(logps.dtype))
    clipped = ratio.clamp(1 - epsilon, 1 + epsilon)
    per_token = -torch.minimum(ratio * advantages, clipped * advantages) * mask
    slope = torch.where(ratio * advantages <= clipped * advantages, -ratio * advantages, 0.0) * mask
    count = mask.sum()
    return per_token.sum() / count, slope / count, float(per_token.abs().sum() / count)


@torch.no_grad()
def gradients(
    hidden: Tensor, weight: Tensor, target_ids: Tensor, slope: Tensor, support: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute the gradients of Σ slope·logp with respect to hidden and weight.

    The logps are normalised over the ids in `support`, (N, K), or over all ids. Rows with slope 0
    are skipped.

    Returns:
        The gradients of `hidden` (N, H) and of `weight` (V, H), in the dtype of `slope`.
    """
    head = weight.to(slope.dtype)
    grad_hidden = torch.zeros_like(hidden, dtype=slope.dtype)
    grad_weight = torch.zeros_like(head)
    active = slope.nonzero().squeeze(-1)
    for block in blocks(active):
        rows = active[block]
        h = hidden[rows].to(slope.dtype)
        logits = logits_of(h, head, None if support is None else support[rows])
        grad_logits = torch.softmax(logits, -1).neg_()
        grad_logits[torch.arange(len(rows)), target_ids[rows]] += 1.0
        grad_logits *= slope[rows, None]
        grad_hidden[rows] = grad_logits @ head
        grad_weight.addmm_(grad_logits.T, h)
    return grad_hidden, grad_weight
