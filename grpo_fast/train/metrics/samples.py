"""Metrics of the samples: rewards, lengths, age, and agreement of sampler and trainer."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_fast.errors import EngineError
from grpo_fast.rollout import Samples, Sampling

log = logging.getLogger(__name__)

# A run warns if the log-probs of sampler and trainer differ by more than this limit, in nats per
# token. For comparison, rounding in 16-bit kernels causes a difference of about a tenth of the
# limit. A sampler with weights that are a few updates old differs by about ten times the limit.
MOST_DIFFERENCE = 0.05


def reward_metrics(
    rewards: Tensor, scores: Mapping[str, Tensor], lost: Mapping[str, Counter[str]], group_size: int
) -> dict[str, float]:
    """Compute the mean reward, its spread within groups, and metrics of each reward function.

    The metric `rewards/<fn>/failed` counts the samples without a reward from a function. The metric
    `rewards/<fn>/failed/<reason>` counts only the samples with this reason.

    Args:
        rewards: weighted sums of the rewards, shape (N·G,).
        scores: rewards of each function, shape (N·G,).
        lost: for each reward function, the number of samples without a reward, by reason.
        group_size: number of samples in a group (G).
    """
    groups = rewards.double().view(-1, group_size)
    spread = torch.stack([spread_of(group) for group in groups])
    metrics = {
        "reward": _mean(rewards),
        "reward_std": float(spread.mean()),
        "frac_reward_zero_std": float((spread == 0).double().mean()),
    }
    for name, values in scores.items():
        metrics |= {
            f"rewards/{name}/mean": _mean(values),
            f"rewards/{name}/std": float(spread_of(values.double())),
            f"rewards/{name}/failed": float(lost[name].total()),
        }
        for why, count in lost[name].items():
            metrics[f"rewards/{name}/failed/{why}"] = float(count)
    return metrics


def completion_metrics(samples: Samples) -> dict[str, float]:
    """Compute the metrics `completions/…`: statistics of the completion lengths in tokens.

    The lengths include EOS. The metrics with `terminated` cover only the completions that ended
    before the length limit.
    """
    lengths = samples.lengths
    ended = [n for n, cut in zip(lengths, samples.truncated.tolist(), strict=True) if not cut]
    metrics = {"completions/clipped_ratio": 1 - len(ended) / len(lengths)}
    for infix, values in (("", lengths), ("terminated_", ended)):
        metrics[f"completions/mean_{infix}length"] = sum(values) / len(values) if values else 0.0
        metrics[f"completions/min_{infix}length"] = float(min(values, default=0))
        metrics[f"completions/max_{infix}length"] = float(max(values, default=0))
    return metrics


def support_metrics(samples: Samples) -> dict[str, float]:
    """Compute the metrics `sampling/…` of the tokens' supports.

    The support of a token is the set of token ids that top_k and top_p kept when the token was
    sampled. The metrics are the size of the support and its total probability.
    """
    if samples.support is None:
        return {}
    sizes = samples.support.offsets.diff()
    is_known = sizes > 0
    metrics = {
        "sampling/support_size/mean": float(sizes[is_known].double().mean()),
        "sampling/support_size/max": float(sizes.max()),
    }
    mass = None if samples.mass is None else samples.mass[is_known]
    if mass is not None and not mass.isnan().all():
        metrics["sampling/kept_mass/mean"] = _mean(mass)
    return metrics


def staleness(samples: Samples, step: int, most: int) -> dict[str, float]:
    """Compute the metrics `sampling/staleness/…`: the age of the weights that sampled.

    Args:
        samples: the samples, with the version of the weights that sampled each of them.
        step: number of the current step.
        most: maximum age in steps. If it is 0, the age is only checked, and the result is {}.

    Raises:
        EngineError: the weights of a sample are older than `most` steps.
    """
    ages = step - 1 - samples.weight_version
    oldest = int(ages.max())
    if oldest > most:
        expected = f"expected completions of weights at most {most} steps old (rollout.ahead)"
        raise EngineError(f"rollout: {expected} in step {step}, got some of {oldest}")
    if most == 0:
        return {}
    return {
        "sampling/staleness/mean": float(ages.double().mean()),
        "sampling/staleness/max": float(oldest),
    }


def spread_of(values: Tensor) -> Tensor:
    """Return the sample standard deviation (divisor n − 1) as a 0-d tensor, ignoring NaN.

    The standard deviation of fewer than two values is 0.
    """
    values = values[~values.isnan()]
    if values.numel() < 2 or bool((values == values[0]).all()):
        return torch.zeros((), dtype=torch.float64)
    return values.std()


def _mean(values: Tensor) -> float:
    return float(values.double().nanmean())


@dataclass
class SamplerWatch:
    """Monitor that warns once per run if the log-probs of sampler and trainer differ."""

    sampling: Sampling
    has_warned: bool = False

    def look(self, step: int, logps: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Warn if the log-probs of trainer and sampler differ by more than MOST_DIFFERENCE.

        Args:
            step: number of the step.
            logps: pairs of the trainer's and the sampler's log-probs. The trainer's log-probs are
                from before the updates of the step.
        """
        difference = sampling_metrics(logps).get("sampling/sampling_logp_difference/mean", 0.0)
        if self.has_warned or difference <= MOST_DIFFERENCE:
            return
        self.has_warned = True
        causes = "stale weights, another dtype or temperature, or another prompt"
        if self.sampling.truncates:
            causes = f"the mass that top_k and top_p leave out, {causes}"
        log.warning(
            "step %d: the sampler's and the trainer's logps are %.2g nats apart per token "
            "(expected ≤ %g): %s; rollout.correct_sampling weighs the loss with their ratio",
            step, difference, MOST_DIFFERENCE, causes,
        )  # fmt: skip


def sampling_metrics(logps: Sequence[tuple[Tensor, Tensor]]) -> dict[str, float]:
    """Compare the log-probs of trainer and sampler by their differences and their ratios.

    Args:
        logps: pairs of the trainer's and the sampler's log-probs, as in `LossMetrics.logps`.

    Returns:
        The metrics `sampling/…`, or {} if there are no log-probs.
    """
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
