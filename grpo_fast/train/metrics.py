"""Metrics of one training step, merged over its micro-batches, under TRL's names."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from grpo_fast.rewards.reward_set import RewardResult
from grpo_fast.rollout import Rollout

# FLOP/s of dense bf16 products from the data sheets, by the words of a GPU's name; the first line that fits counts.
PEAK_FLOPS: tuple[tuple[set[str], float], ...] = (
    ({"H200", "NVL"}, 835e12),
    ({"H200"}, 989e12),
    ({"H100", "NVL"}, 835e12),
    ({"H100", "PCIe"}, 756e12),
    ({"H100", "HBM3"}, 989e12),
    ({"A100"}, 312e12),
)

SUMS = {"active_tokens", "skipped_rows", "kl_guarded"}  # counts
PARTIAL = {"loss", "policy_loss"}  # already weighted by the step's normalisers: the pieces add up
NORMS = {"policy_logp_grad_norm"}  # of the pieces of one vector: their squares add up


class LossMetrics:
    """Merges what the loss returned for the micro-batches of one or more optimizer steps; one device sync, at the end.

    Means weigh each micro-batch by its tokens, minima and maxima are over all of it, counts add up; `loss` and
    `policy_loss` add up inside an optimizer step and are averaged over optimizer steps (norms: in the square mean).
    """

    def __init__(self) -> None:
        self.parts: list[tuple[dict[str, Tensor], int]] = []
        self.optimizer_steps = 0

    def add(self, metrics: Mapping[str, Tensor], tokens: int, share: float = 1.0) -> None:
        """One micro-batch: its metrics, its tokens, and the factor its loss was given."""
        part = {name: value.detach().float() for name, value in metrics.items()}
        for name in PARTIAL & part.keys():
            part[name] = part[name] * share
        self.parts.append((part, tokens))

    def extend(self, other: LossMetrics) -> None:
        """Take over the parts of another optimizer step."""
        self.parts += other.parts
        self.optimizer_steps += other.optimizer_steps

    def last(self, name: str) -> float:
        """A metric of the latest micro-batch (one sync)."""
        return float(self.parts[-1][0][name])

    def result(self) -> dict[str, float]:
        if not self.parts:
            return {}
        merged: dict[str, Tensor] = {}
        for name in self.parts[0][0]:
            values = torch.stack([part[name] for part, _ in self.parts])
            merged[name] = self._merge(name, values)
        names = list(merged)
        return dict(zip(names, torch.stack([merged[n] for n in names]).tolist(), strict=True))

    def _merge(self, name: str, values: Tensor) -> Tensor:
        if name in PARTIAL:
            return values.sum() / max(self.optimizer_steps, 1)
        if name in NORMS:
            return (values.square().sum() / max(self.optimizer_steps, 1)).sqrt()
        if name in SUMS:
            return values.sum()
        if name.endswith("min"):
            return values.min()
        if name.endswith("max"):
            return values.max()
        weights = torch.tensor([float(tokens) for _, tokens in self.parts], device=values.device)
        return (values * weights).sum() / weights.sum().clamp(min=1)


def reward_metrics(scores: RewardResult, group_size: int) -> dict[str, float]:
    """`reward`, `reward_std` (mean over groups), `frac_reward_zero_std`, `rewards/<fn>/{mean,std,failed}`.

    NaN rewards are left out; `failed` counts a function's samples that have none.
    """
    total = scores.total
    groups = total.double().view(-1, group_size)
    spread = torch.stack([_std(group) for group in groups])
    metrics = {
        "reward": _mean(total),
        "reward_std": float(spread.mean()),
        "frac_reward_zero_std": float((spread == 0).double().mean()),
    }
    for name, values in scores.per_fn.items():
        metrics[f"rewards/{name}/mean"], metrics[f"rewards/{name}/std"] = _mean(values), float(_std(values.double()))
        metrics[f"rewards/{name}/failed"] = float(scores.failures[name])
    return metrics


def completion_metrics(rollout: Rollout) -> dict[str, float]:
    """`completions/…`: lengths in tokens with the EOS, of all and of those that ended by themselves."""
    lengths = rollout.lengths
    ended = [n for n, cut in zip(lengths, rollout.truncated, strict=True) if not cut]
    metrics = {"completions/clipped_ratio": 1 - len(ended) / len(lengths)}
    for infix, values in (("", lengths), ("terminated_", ended)):
        metrics[f"completions/mean_{infix}length"] = sum(values) / len(values) if values else 0.0
        metrics[f"completions/min_{infix}length"] = float(min(values, default=0))
        metrics[f"completions/max_{infix}length"] = float(max(values, default=0))
    return metrics


def sampling_metrics(trainer_logps: Tensor, sampling_logps: Tensor) -> dict[str, float]:
    """How far the trainer's log-probabilities are from the sampler's: `sampling/…`, both (R,) over the active tokens.

    With top_p or top_k the sampler's distribution is truncated, and the difference includes that.
    """
    if not trainer_logps.numel():
        return {}
    difference = (trainer_logps - sampling_logps).abs()
    ratio = (trainer_logps - sampling_logps).exp()
    return {
        "sampling/sampling_logp_difference/mean": float(difference.mean()),
        "sampling/sampling_logp_difference/max": float(difference.max()),
        "sampling/importance_sampling_ratio/min": float(ratio.min()),
        "sampling/importance_sampling_ratio/mean": float(ratio.mean()),
        "sampling/importance_sampling_ratio/max": float(ratio.max()),
    }


class Work:
    """The flops of a model's matrix products, which `perf/mfu` holds against the GPU's bf16 peak, whatever the dtype.

    Per weight and row: 2 forward, 2 for the gradient of the input, and 2 for the weight's own where it is trained.
    Attention's scores, the look-up of embeddings and whatever checkpointing does twice do not count.
    """

    def __init__(self, lm: Any) -> None:
        head, embedding = lm.get_output_embeddings().weight, lm.get_input_embeddings().weight
        trunk = [p for p in lm.parameters() if p.dim() > 1 and p is not head and p is not embedding]
        self.trunk = sum(p.numel() for p in trunk)
        self.trained_trunk = sum(p.numel() for p in trunk if p.requires_grad)
        self.head, self.trained_head = head.numel(), head.numel() * head.requires_grad
        # Of a mixture of experts each token takes a few: how many is not known here.
        is_dense = not any("experts" in name for name, _ in lm.named_parameters())
        self.peak = peak_flops(head.device) if is_dense else None

    def forward(self, tokens: int, rows: int) -> int:
        """Of `tokens` in the trunk, `rows` of which reach the head."""
        return 2 * (self.trunk * tokens + self.head * rows)

    def update(self, tokens: int, rows: int) -> int:
        """Forward and backward."""
        return 2 * self.forward(tokens, rows) + 2 * (self.trained_trunk * tokens + self.trained_head * rows)

    def metrics(self, flops: float, seconds: float) -> dict[str, float]:
        """`perf/mfu`: the fraction of the peak; nothing where that is not known."""
        return {} if self.peak is None else {"perf/mfu": flops / seconds / self.peak}


def peak_flops(device: torch.device) -> float | None:
    """None for a CPU, a GPU that the table does not know, and a slice of one (MIG)."""
    words = set(torch.cuda.get_device_name(device).replace("-", " ").split()) if device.type == "cuda" else {"MIG"}
    return None if "MIG" in words else next((peak for name, peak in PEAK_FLOPS if name <= words), None)


def _mean(values: Tensor) -> float:
    return float(values.double().nanmean())


def _std(values: Tensor) -> Tensor:
    values = values[~values.isnan()]
    if values.numel() < 2 or bool((values == values[0]).all()):
        return torch.zeros((), dtype=torch.float64)
    return values.std()


def is_timing(name: str) -> bool:
    """Metrics that differ from run to run on the same machine."""
    return name == "step_time" or name.startswith("perf/") or name.endswith("_time")


def finite(metrics: Mapping[str, float]) -> dict[str, float]:
    """Without NaN values (a mean over nothing)."""
    return {name: value for name, value in metrics.items() if not math.isnan(value)}
