"""Sampler and trainer compared: their log-probabilities of the same tokens."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from grpo_fast.rollout import Sampling

log = logging.getLogger(__name__)

# Nats per token, on average: ten times what 16-bit kernels differ by, a tenth of a policy that is a
# few updates old.
FAR = 0.05


class SamplerWatch:
    """Compares logps of the weights that a step begins with; warns once in a run."""

    def __init__(self, sampling: Sampling) -> None:
        self.truncates = sampling.truncates
        self.has_warned = False

    def look(self, step: int, logps: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Pairs (R,) of a step's first update: the trainer's, before any update, the sampler's."""
        if self.has_warned or not logps:
            return
        trainers, samplers = map(torch.cat, zip(*logps, strict=True))
        if not trainers.numel():
            return
        difference = float((trainers - samplers).abs().mean())
        if difference <= FAR:
            return
        self.has_warned = True
        causes = "stale weights, another dtype or temperature, or another prompt"
        if self.truncates:
            causes = f"the mass that top_k and top_p leave out, {causes}"
        log.warning(
            "step %d: the sampler's and the trainer's logps are %.2g nats apart per token "
            "(expected ≤ %g): %s; rollout.correct_sampling weighs the loss with their ratio",
            step, difference, FAR, causes,
        )  # fmt: skip


def sampling_metrics(logps: Sequence[tuple[Tensor, Tensor]]) -> dict[str, float]:
    """How far the trainer's logps are from the sampler's, pairs of `LossMetrics`: `sampling/…`."""
    trainers, samplers = map(torch.cat, zip(*logps, strict=True))
    if not trainers.numel():
        return {}
    difference, ratio = (trainers - samplers).abs(), (trainers - samplers).exp()
    return {
        "sampling/sampling_logp_difference/mean": float(difference.mean()),
        "sampling/sampling_logp_difference/max": float(difference.max()),
        "sampling/importance_sampling_ratio/min": float(ratio.min()),
        "sampling/importance_sampling_ratio/mean": float(ratio.mean()),
        "sampling/importance_sampling_ratio/max": float(ratio.max()),
    }
