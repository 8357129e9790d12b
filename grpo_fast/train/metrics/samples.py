"""Metrics of what was sampled: rewards, lengths, candidates, agreement with the trainer."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from grpo_fast.rewards.reward_set import RewardResult
from grpo_fast.rollout import Rollout, Sampling

log = logging.getLogger(__name__)

# Nats per token, on average: ten times what 16-bit kernels differ by, a tenth of a policy that is a
# few updates old.
FAR = 0.05


def reward_metrics(scores: RewardResult, group_size: int) -> dict[str, float]:
    """`reward`, its spread in the groups (`reward_std`, `frac_reward_zero_std`), each function's;
    `rewards/<fn>/failed` counts samples without a reward, and `…/failed/<why>` those of a reason.
    """
    spread = torch.stack([spread_of(group) for group in scores.total.double().view(-1, group_size)])
    metrics = {
        "reward": _mean(scores.total),
        "reward_std": float(spread.mean()),
        "frac_reward_zero_std": float((spread == 0).double().mean()),
    }
    for name, values in scores.per_fn.items():
        metrics |= {
            f"rewards/{name}/mean": _mean(values),
            f"rewards/{name}/std": float(spread_of(values.double())),
            f"rewards/{name}/failed": float(scores.failures[name]),
        }
        for why, count in scores.reasons[name].items():
            metrics[f"rewards/{name}/failed/{why}"] = float(count)
    return metrics


def completion_metrics(rollout: Rollout) -> dict[str, float]:
    """`completions/…`: lengths in tokens with the EOS, of all and of those that ended in time."""
    lengths = rollout.lengths
    ended = [n for n, cut in zip(lengths, rollout.truncated, strict=True) if not cut]
    metrics = {"completions/clipped_ratio": 1 - len(ended) / len(lengths)}
    for infix, values in (("", lengths), ("terminated_", ended)):
        metrics[f"completions/mean_{infix}length"] = sum(values) / len(values) if values else 0.0
        metrics[f"completions/min_{infix}length"] = float(min(values, default=0))
        metrics[f"completions/max_{infix}length"] = float(max(values, default=0))
    return metrics


def kept_metrics(rollout: Rollout) -> dict[str, float]:
    """`sampling/…` of what tokens were drawn from: how many candidates, and their probability."""
    sets = [kept for kept in rollout.kept if kept is not None]
    if not sets:
        return {}
    sizes = torch.cat([kept.offsets.diff() for kept in sets]).double()
    masses = [kept.mass for kept in sets if kept.mass is not None]
    return {
        "sampling/support_size/mean": float(sizes.mean()),
        "sampling/support_size/max": float(sizes.max()),
        **({"sampling/kept_mass/mean": _mean(torch.cat(masses))} if masses else {}),
    }


def spread_of(values: Tensor) -> Tensor:
    """0-d: the standard deviation (n − 1) of those that are not NaN; 0 of fewer than two."""
    values = values[~values.isnan()]
    if values.numel() < 2 or bool((values == values[0]).all()):
        return torch.zeros((), dtype=torch.float64)
    return values.std()


def _mean(values: Tensor) -> float:
    return float(values.double().nanmean())


class SamplerWatch:
    """Compares logps of the weights that a step begins with; warns once in a run."""

    def __init__(self, sampling: Sampling) -> None:
        self.truncates = sampling.truncates
        self.has_warned = False

    def look(self, step: int, logps: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Warn where the trainer's logps, before any update, are far from the sampler's (R,)."""
        difference = sampling_metrics(logps).get("sampling/sampling_logp_difference/mean", 0.0)
        if self.has_warned or difference <= FAR:
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
    if not any(own.numel() for own, _ in logps):
        return {}
    trainers, samplers = map(torch.cat, zip(*logps, strict=True))
    difference, ratio = (trainers - samplers).abs(), (trainers - samplers).exp()
    return {
        "sampling/sampling_logp_difference/mean": float(difference.mean()),
        "sampling/sampling_logp_difference/max": float(difference.max()),
        "sampling/importance_sampling_ratio/min": float(ratio.min()),
        "sampling/importance_sampling_ratio/mean": float(ratio.mean()),
        "sampling/importance_sampling_ratio/max": float(ratio.max()),
    }
