"""Metrics of a step: time and memory, rewards, lengths, age of the samples, and losses."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from grpo_fast.errors import EngineError
from grpo_fast.rollout import Samples
from grpo_fast.train import ranks

# Metrics of which each micro-batch reports its part of the value of an optimizer step. The parts
# are summed within an optimizer step, and the sums are averaged over the optimizer steps.
PARTS = ("loss", "policy_loss", "value/loss")
SUMS = ("active_tokens", "skipped_rows", "kl_guarded")  # metrics that are summed over micro-batches


@dataclass
class Clock:
    """Clock for one training step. Call `lap` at the end of each part of the step."""

    seconds: dict[str, float] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=dict)  # sampled or trunk tokens of each part
    peak: int = 0  # peak GPU memory in bytes
    start: float = field(default_factory=time.perf_counter)
    last: float = field(default_factory=time.perf_counter)

    def lap(self, name: str, tokens: int = 0) -> None:
        """Mark the end of a part of the step, and add the time since the previous lap to it.

        Args:
            name: name of the part. A name may occur several times in a step.
            tokens: number of tokens that this part processed.
        """
        if torch.cuda.is_available():
            # Wait for the GPU. CUDA kernels run asynchronously, and their time would otherwise be
            # attributed to the next part.
            torch.cuda.synchronize()
            self.peak = max(self.peak, torch.cuda.max_memory_allocated())
            torch.cuda.reset_peak_memory_stats()
        now = time.perf_counter()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self.last
        self.tokens[name] = self.tokens.get(name, 0) + tokens
        self.last = now

    def metrics(self) -> dict[str, float]:
        """Return the total time, the time and token rate of each part, and the peak GPU memory."""
        metrics = {"step_time": self.last - self.start}
        for name in ("rollout", "train"):
            metrics[f"perf/{name}_tok_s"] = self.tokens[name] / self.seconds[name]
        for name, seconds in self.seconds.items():
            metrics[f"perf/{name}_time"] = seconds
        if self.peak:
            metrics["perf/peak_memory_gib"] = self.peak / 2**30
        return metrics


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
    if samples.mass is not None:
        metrics["sampling/kept_mass/mean"] = _mean(samples.mass[is_known])
    return metrics


def check_versions(samples: Samples, step: int) -> None:
    """Raise an EngineError if samples of a step come from the weights of an earlier step."""
    oldest = int((step - 1 - samples.weight_version).max())
    if oldest > 0:
        said = f"rollout: expected completions of the current weights in step {step}"
        error = EngineError(f"{said}, got some of weights {oldest} steps old")
        raise ranks.common(error)  # all ranks have all samples


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


@dataclass
class LossMetrics:
    """Metrics of all micro-batches of a step. `result` reduces them with only one GPU sync."""

    parts: list[tuple[dict[str, Tensor], int]] = field(default_factory=list)  # metrics, tokens
    # For each micro-batch, the log-probs of its active tokens from the trainer and from the
    # sampler. Both tensors have the shape (active tokens,).
    logps: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    optimizer_steps: int = 1
    grad_norm: float = math.nan  # before clipping
    learning_rate: float = math.nan

    @classmethod
    def merged(cls, updates: Sequence[LossMetrics]) -> LossMetrics:
        """Merge the losses of several optimizer steps."""
        parts = [part for each in updates for part in each.parts]
        logps = [pair for each in updates for pair in each.logps]
        return cls(parts, logps, len(updates))

    def add(self, metrics: Mapping[str, Tensor], tokens: int) -> None:
        """Add the metrics of a micro-batch, weighted by its number of tokens."""
        part = {name: value.detach().float() for name, value in metrics.items()}
        self.parts.append((part, tokens))

    def of_all_ranks(self) -> LossMetrics:
        """Gather the metrics of the micro-batches of all ranks."""
        if ranks.size() == 1:
            return self
        parts = []
        for part, tokens in self.parts:
            values = torch.stack(list(part.values())).cpu()  # copies all values with one GPU sync
            parts.append((dict(zip(part, values, strict=True)), tokens))
        logps = [(own.cpu(), theirs.cpu()) for own, theirs in self.logps]
        every = LossMetrics.merged(ranks.gather(LossMetrics(parts, logps)))
        every.optimizer_steps = self.optimizer_steps  # the ranks take these steps together
        return every

    def result(self) -> dict[str, float]:
        """Reduce all metrics over all micro-batches."""
        names = list(self.parts[0][0])
        merged = [self._merge(n, torch.stack([part[n] for part, _ in self.parts])) for n in names]
        return dict(zip(names, torch.stack(merged).tolist(), strict=True))

    def _merge(self, name: str, values: Tensor) -> Tensor:
        if name in PARTS:
            return values.sum() / self.optimizer_steps
        if name in SUMS:
            return values.sum()
        if name.endswith(("min", "max")):
            # Exclude micro-batches without tokens. They report 0, which could be mistaken for the
            # minimum or maximum.
            filled = [v for v, (_, tokens) in zip(values, self.parts, strict=True) if tokens]
            values = torch.stack(filled) if filled else values
            return values.min() if name.endswith("min") else values.max()
        # All other metrics are means over tokens.
        weights = torch.tensor([float(tokens) for _, tokens in self.parts], device=values.device)
        return (values * weights).sum() / weights.sum().clamp(min=1)


def finite(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics that are not NaN."""
    return {name: value for name, value in metrics.items() if not math.isnan(value)}
