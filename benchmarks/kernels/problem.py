"""Input tensors of a benchmark case, which all providers share, and the exact results."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.kernels import exact
from benchmarks.kernels.operations import COMPLETIONS, Shape

EPSILON = 0.2
LOGIT_STD = 2.0
FREQUENT = 2000  # number of ids from which half of each support is drawn
# Mean and standard deviation of the gap in a peaked row, in nats. The gap is the logit of the
# likeliest token minus the log-sum-exp of all other logits.
PEAK = (4.0, 2.0)


class Variant(NamedTuple):
    """Properties of the token rows of a problem.

    Attributes:
        active: fraction of the completion tokens that have a gradient.
        inactive: reason why the other tokens have no gradient. "masked": the tokens are masked.
            "zero-advantage": their completions have advantage 0. "clipped": their ratios are
            clipped, which is only known after the logps are computed.
        softmax: "flat" (logits with standard deviation 2) or "peaked" (the probability of the
            target is mostly above 0.9).
        mask: "full", or "ragged" for right-padded completions, which fill between a quarter and all
            of their slots.
        support: number of ids in the support of each token, which are the ids that a truncating
            sampler could choose. 0: all ids.
    """

    active: float = 1.0
    inactive: str = "masked"
    softmax: str = "flat"
    mask: str = "full"
    support: int = 0


STANDARD = Variant()


@dataclasses.dataclass(eq=False)
class Problem:
    """Packed GRPO batch of 8 completions with N/8 tokens each, for the loss "dapo" without KL.

    The advantages have both signs. No ratio is close to a clip bound, because a provider that
    rounds its logits to 16 bits could then clip a token that the exact result does not clip.
    """

    hidden: Tensor  # (N, H), requires grad
    weight: Tensor  # (V, H), requires grad
    target_ids: Tensor  # (N,) int64, drawn from the model's own softmax
    advantages: Tensor  # (B,) fp32
    old_logps: Tensor  # (N,) fp32
    mask: Tensor  # (N,) fp32, 0 or 1
    cu_seqlens: Tensor  # (B + 1,) int32
    support_ids: Tensor | None = None  # (N, K) int64, with the target first; None: all ids

    @property
    def shape(self) -> Shape:
        return Shape(self.hidden.shape[0], self.hidden.shape[1], self.weight.shape[0])

    @functools.cached_property
    def count(self) -> int:
        """Return the number of unmasked tokens, by which the loss is divided."""
        return int(self.mask.sum())

    @functools.cached_property
    def mask_or_none(self) -> Tensor | None:
        """Return the mask as (N,) bool, or None if no token is masked."""
        return None if self.count == len(self.mask) else self.mask.bool()

    @property
    def labels(self) -> Tensor:
        """Return the target ids, with -100 for masked tokens: (N,) int64."""
        return self.target_ids.masked_fill(self.mask == 0, -100)

    @property
    def token_advantages(self) -> Tensor:
        """Return the advantage of each token, which is that of its completion: (N,) fp32."""
        return self.advantages.repeat_interleave(self.hidden.shape[0] // COMPLETIONS)

    @functools.cached_property
    def grad_logps(self) -> Tensor:
        """Return the exact gradient of the loss with respect to the logps, (N,) fp32."""
        return self._loss_and_slope[1].float()

    @functools.cached_property
    def logits(self) -> Tensor:
        """Return the logits of a padded batch, (B, N/B + 1, V).

        The last row of each completion is unused, because it predicts no token.
        """
        logits = self.hidden.detach() @ self.weight.detach().T
        return torch.nn.functional.pad(logits.unflatten(0, (COMPLETIONS, -1)), (0, 0, 0, 1))

    @functools.cached_property
    def logps(self) -> Tensor:
        """Return the exact log-probabilities, (N,)."""
        return exact.logps(self.hidden, self.weight, self.target_ids, self.support_ids)

    @functools.cached_property
    def _loss_and_slope(self) -> tuple[Tensor, Tensor, float]:
        return exact.dapo(self.logps, self.old_logps, self.token_advantages, self.mask, EPSILON)

    def truth(self, kind: str) -> exact.Truth:
        """Return the exact results for one kind of operation.

        Args:
            kind: "loss", "frozen", "cross_entropy", "logps", "logps_backward" or "logits_loss".
        """
        return getattr(self, f"_{kind}_truth")

    @functools.cached_property
    def _loss_truth(self) -> exact.Truth:
        loss, slope, scale = self._loss_and_slope
        return exact.Truth({"loss": loss, **self._gradients(slope)}, loss_scale=scale)

    @functools.cached_property
    def _frozen_truth(self) -> exact.Truth:
        values = self._loss_truth.values
        kept = {name: x for name, x in values.items() if name != "grad_weight"}
        return dataclasses.replace(self._loss_truth, values=kept)

    @functools.cached_property
    def _cross_entropy_truth(self) -> exact.Truth:
        slope = -self.mask.double() / self.count
        loss = (self.logps * slope).sum()
        return exact.Truth({"loss": loss, **self._gradients(slope)}, loss_scale=float(loss))

    @functools.cached_property
    def frozen(self) -> Problem:
        """Return the problem with a weight that does not require grad, as under LoRA."""
        return dataclasses.replace(self, weight=self.weight.detach())

    @functools.cached_property
    def _logps_truth(self) -> exact.Truth:
        return exact.Truth({"logps": self.logps}, mask=self.mask)

    @functools.cached_property
    def _logps_backward_truth(self) -> exact.Truth:
        gradients = self._gradients(self.grad_logps.double())
        return exact.Truth({"logps": self.logps, **gradients}, mask=self.mask)

    @functools.cached_property
    def _logits_loss_truth(self) -> exact.Truth:
        """Compute the exact loss of `self.logits`, which have been rounded to their dtype."""
        logits, targets = self.logits.flatten(0, 1), spread(self.target_ids)
        lse = torch.cat([logits[x].double().logsumexp(-1) for x in exact.blocks(logits)])  # (R,)
        logps = logits.gather(-1, targets[:, None]).squeeze(-1).double() - lse
        advantages, old, mask = (
            spread(x) for x in (self.token_advantages, self.old_logps, self.mask)
        )
        loss, slope, scale = exact.dapo(logps, old, advantages, mask, EPSILON)
        gradient = exact.logits_gradient(logits, targets, lse, slope)
        return exact.Truth({"loss": loss, "grad_logits": gradient}, loss_scale=scale)

    def _gradients(self, slope: Tensor) -> dict[str, Tensor]:
        inputs = (self.hidden, self.weight, self.target_ids)
        pair = exact.gradients(*inputs, slope, self.support_ids)
        return dict(zip(("grad_hidden", "grad_weight"), pair, strict=True))


def spread(values: Tensor) -> Tensor:
    """Convert per-token values of shape (N,) to the rows of `Problem.logits`, (N + B,).

    The unused row of each completion gets 0.
    """
    return torch.nn.functional.pad(values.view(COMPLETIONS, -1), (0, 1)).flatten()


def make_problem(
    shape: Shape, dtype: torch.dtype, device: str = "cpu", variant: Variant = STANDARD
) -> Problem:
    """Build a problem with random hidden states and a random LM head.

    The target ids are sampled from the softmax of the logits.
    """
    n, h, v = shape
    generator = torch.Generator(device).manual_seed(0)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device=device)

    hidden, weight = normal(n, h), normal(v, h) * (LOGIT_STD / h**0.5)
    if variant.softmax == "peaked":
        likeliest = weight[torch.randint(v, (n,), generator=generator, device=device)]
        lift = math.log(v) + LOGIT_STD**2 / 2 + PEAK[0] + PEAK[1] * normal(n, 1)
        hidden += lift * likeliest / likeliest.square().sum(-1, keepdim=True)
    hidden, weight = hidden.to(dtype), weight.to(dtype)
    target_ids = exact.draw(hidden, weight, generator)
    support_ids = None
    if variant.support:
        support_ids = draw_support(target_ids, v, variant.support, generator)
    logps = exact.logps(hidden, weight, target_ids, support_ids)
    advantages, log_ratio, mask = coefficients(n, variant, generator)
    old_logps = (logps - log_ratio.to(logps.dtype)).float()
    # A positive log-probability is impossible. Replace it by the current logp: the ratio is then 1.
    old_logps = torch.where(old_logps > 0, logps.float(), old_logps)
    cu_seqlens = torch.arange(0, n + 1, n // COMPLETIONS, dtype=torch.int32, device=device)
    hidden, weight = hidden.requires_grad_(), weight.requires_grad_()
    fields = (hidden, weight, target_ids, advantages, old_logps, mask, cu_seqlens)
    return Problem(*fields, support_ids=support_ids)


def draw_support(target_ids: Tensor, v: int, count: int, generator: torch.Generator) -> Tensor:
    """Draw `count` different ids for each token, (N, count). The first id is the target.

    Half of the ids are among `FREQUENT` frequent ids.
    """
    n, device = len(target_ids), target_ids.device
    frequent = min(FREQUENT, v // 2)
    half = min(count // 2, frequent)
    parts = []
    for first, size, number in ((0, frequent, half), (frequent, v - frequent, count - half)):
        # Draw one id from each of `number` intervals, so that the ids of a row differ.
        width = size // max(number, 1)
        offsets = torch.randint(width, (n, number), generator=generator, device=device)
        parts.append(first + torch.arange(number, device=device) * width + offsets)
    ids = torch.randperm(v, generator=generator, device=device)[torch.cat(parts, 1)]
    ids = torch.where(ids == target_ids[:, None], ids[:, :1], ids)
    ids[:, 0] = target_ids
    return ids


def coefficients(
    n: int, variant: Variant, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw the advantages (B,), log ratios (N,) and mask (N,) of a variant, all in fp32."""
    device, slots = generator.device, n // COMPLETIONS

    def uniform(count: int) -> Tensor:
        return torch.rand(count, generator=generator, device=device)

    sign = torch.tensor([1.0, -1.0], device=device).repeat(COMPLETIONS // 2)
    advantages, signs = sign * (0.5 + uniform(COMPLETIONS)), sign.repeat_interleave(slots)
    # Half of the ratios are close to 1. The other half are outside the clip range, on the side
    # where the loss still has a gradient.
    noise = 0.02 * torch.randn(n, generator=generator, device=device)
    log_ratio = torch.where(uniform(n) < 0.5, -0.5 * signs, noise)
    mask = ragged_mask(n, device) if variant.mask == "ragged" else torch.ones(n, device=device)
    idle = uniform(n) >= variant.active
    if variant.inactive == "masked":
        mask = mask * ~idle
        mask[0] = 1.0
    elif variant.inactive == "zero-advantage":
        advantages[max(1, round(variant.active * COMPLETIONS)) :] = 0.0
    else:
        log_ratio = torch.where(idle, 0.5 * signs, log_ratio)
    return advantages, log_ratio, mask


def ragged_mask(n: int, device: torch.device) -> Tensor:
    """Return the (N,) mask of right-padded completions. Each fills 1/4 to all of its slots."""
    slots = n // COMPLETIONS
    lengths = torch.linspace(slots / 4, slots, COMPLETIONS, device=device).round().clamp(min=1)
    lengths = lengths[[3, 7, 0, 5, 2, 6, 1, 4]]
    return (torch.arange(slots, device=device) < lengths[:, None]).float().flatten()
