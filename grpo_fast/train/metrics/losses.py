"""Metrics of one training step under TRL's names: of the loss, the rewards, the clock, the GPU."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from grpo_fast import LossConfig, LossOutput, grpo_loss
from grpo_fast.rewards.reward_set import RewardResult
from grpo_fast.rollout import Rollout
from grpo_fast.train.ranks import distributed

# FLOP/s of dense bf16 products from the data sheets, by the words of a GPU's name; the first line
# that fits counts.
PEAK_FLOPS: tuple[tuple[set[str], float], ...] = (
    ({"H200", "NVL"}, 835e12),
    ({"H200"}, 989e12),
    ({"H100", "NVL"}, 835e12),
    ({"H100", "PCIe"}, 756e12),
    ({"H100", "HBM3"}, 989e12),
    ({"A100"}, 312e12),
)

SUMS = {"active_tokens", "skipped_rows", "kl_guarded"}  # counts
PARTIAL = {"loss", "policy_loss", "value/loss"}  # weighted by the step's normalisers: they add up
NORMS = {"policy_logp_grad_norm"}  # of the pieces of one vector: their squares add up


class LossMetrics:
    """Merges what the loss returned for the micro-batches of optimizer steps; one sync, at the end.

    Means weigh each micro-batch by its tokens, minima and maxima are over those that have tokens,
    counts add up;
    `loss` and its parts add up inside an optimizer step and are averaged over optimizer steps
    (norms: in the square mean).
    """

    def __init__(self) -> None:
        self.parts: list[tuple[dict[str, Tensor], int]] = []
        self.logps: list[tuple[Tensor, Tensor]] = []  # (R,) each, active: trainer's, sampler's
        self.optimizer_steps = 0

    def add(self, metrics: Mapping[str, Tensor], tokens: int, share: float = 1.0) -> None:
        """One micro-batch: its metrics, its tokens, and the factor its loss was given."""
        part = {name: value.detach().float() for name, value in metrics.items()}
        for name in PARTIAL & part.keys():
            part[name] = part[name] * share
        self.parts.append((part, tokens))

    def extend(self, other: LossMetrics, *, with_logps: bool) -> None:
        """Take over the parts of another optimizer step."""
        self.parts += other.parts
        self.optimizer_steps += other.optimizer_steps
        if with_logps:
            self.logps += other.logps

    def of_all_ranks(self) -> LossMetrics:
        """What all ranks have added, on each of them: of an optimizer step, once it is made."""
        if distributed.size() == 1:
            return self
        every = LossMetrics()
        every.optimizer_steps = self.optimizer_steps
        for parts in distributed.gather([[_numbers(part), n] for part, n in self.parts]):
            for part, tokens in parts:
                every.parts.append(({n: torch.tensor(v) for n, v in part.items()}, tokens))
        both = zip(*self.logps, strict=True) if self.logps else ([torch.zeros(0)],) * 2
        ours, samplers = (distributed.gather_tensors(torch.cat(list(x)).cpu()) for x in both)
        every.logps = list(zip(ours, samplers, strict=True))
        return every

    def mean(self, name: str) -> float:
        """One metric, merged (one sync)."""
        return float(self._merge(name, torch.stack([part[name] for part, _ in self.parts])))

    def result(self) -> dict[str, float]:
        if not self.parts:
            return {}
        names = list(self.parts[0][0])
        merged = [self._merge(n, torch.stack([part[n] for part, _ in self.parts])) for n in names]
        return dict(zip(names, torch.stack(merged).tolist(), strict=True))

    def _merge(self, name: str, values: Tensor) -> Tensor:
        if name in PARTIAL:
            return values.sum() / max(self.optimizer_steps, 1)
        if name in NORMS:
            return (values.square().sum() / max(self.optimizer_steps, 1)).sqrt()
        if name in SUMS:
            return values.sum()
        if name.endswith(("min", "max")):  # of no tokens it is 0, which is none of the others'
            pairs = zip(values, self.parts, strict=True)
            counts = [value for value, (_, tokens) in pairs if tokens]
            known = torch.stack(counts) if counts else values
            return known.min() if name.endswith("min") else known.max()
        weights = torch.tensor([float(tokens) for _, tokens in self.parts], device=values.device)
        return (values * weights).sum() / weights.sum().clamp(min=1)


def reward_metrics(scores: RewardResult, group_size: int) -> dict[str, float]:
    """`reward`, its spread in the groups (`reward_std`, `frac_reward_zero_std`), each function's.

    NaN rewards are left out; `rewards/<fn>/failed` counts a function's samples that have none, and
    `rewards/<fn>/failed/<why>` those of a reason that occurred.
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


def sampling_metrics(logps: Sequence[tuple[Tensor, Tensor]]) -> dict[str, float]:
    """How far the trainer's logps are from the sampler's, pairs of `LossMetrics`: `sampling/…`.

    Where a sampler with top_p or top_k does not hand on what it kept, the difference includes that.
    """
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


def kept_metrics(rollout: Rollout) -> dict[str, float]:
    """`sampling/…` of what tokens were drawn from: how many candidates, and their probability."""
    known = [kept for kept in rollout.kept if kept is not None]
    if not known:
        return {}
    sizes = torch.cat([kept.offsets.diff() for kept in known]).double()
    masses = [kept.mass for kept in known if kept.mass is not None]
    return {
        "sampling/support_size/mean": float(sizes.mean()),
        "sampling/support_size/max": float(sizes.max()),
        **({"sampling/kept_mass/mean": _mean(torch.cat(masses))} if masses else {}),
    }


def is_policy_alone(config: LossConfig, shared_critic: bool = False) -> bool:
    """Whether the policy term is the whole loss: no KL term, entropy bonus or value loss."""
    return not config.uses_reference and config.entropy_coef == 0 and not shared_critic


def policy_gradient(
    output: LossOutput, advantages: Tensor, config: LossConfig, per_token: dict
) -> Tensor:
    """0-d: the L2 norm of the policy term's gradient with respect to the tokens' logps.

    With respect to the parameters it would take a second backward pass; this takes one over the
    tokens.
    """
    beta = 0.0 if config.uses_reference else config.beta
    alone = config.replace(entropy_coef=0.0, beta=beta)
    logps = output.logps.detach().requires_grad_()
    with torch.enable_grad():
        loss = grpo_loss(logps, advantages, alone, entropy=output.entropy, **per_token).loss
    return torch.autograd.grad(loss, logps)[0].norm()


class Clock:
    """Seconds and device memory of the parts of a step: `lap(name)` after each of them.

    A part that comes again adds to its seconds. A clock that is given `seconds` and `peaks` goes
    on from there.
    """

    def __init__(
        self, seconds: Mapping[str, float] | None = None, peaks: Mapping[str, int] | None = None
    ) -> None:
        self.seconds = dict(seconds or {})
        self.peaks = dict(peaks or {})  # bytes allocated on the GPU at most, by part
        self.last = time.perf_counter()
        self.start = self.last - sum(self.seconds.values())

    def lap(self, name: str) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            peak = torch.cuda.max_memory_allocated()
            self.peaks[name] = max(peak, self.peaks.get(name, 0))
            torch.cuda.reset_peak_memory_stats()
        now = time.perf_counter()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self.last
        self.last = now

    def metrics(self, generated: int, trained: int) -> dict[str, float]:
        """step_time and perf/…, for so many tokens sampled and so many sent through the trunk."""
        peak = {"perf/peak_memory_gib": max(self.peaks.values()) / 2**30} if self.peaks else {}
        return {
            "step_time": self.last - self.start,
            "perf/rollout_tok_s": generated / self.seconds["rollout"],
            "perf/train_tok_s": trained / self.seconds["train"],
            **{f"perf/{name}_time": seconds for name, seconds in self.seconds.items()},
            **peak,
        }


class Work:
    """The flops of a model's matrix products, for `perf/mfu`, whatever the dtype.

    Per weight and row: 2 forward, 2 for the gradient of the input, and 2 for the weight's own where
    it is trained. Attention's scores, the look-up of embeddings and whatever checkpointing does
    twice do not count.
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
        weights = self.trained_trunk * tokens + self.trained_head * rows
        return 2 * self.forward(tokens, rows) + 2 * weights

    def metrics(
        self, tokens: int, rows: int, *, forwards: int, updates: float, seconds: float
    ) -> dict[str, float]:
        """`perf/mfu`: so many passes, as a fraction of the GPU's bf16 peak where that is known."""
        if self.peak is None:
            return {}
        flops = forwards * self.forward(tokens, rows) + updates * self.update(tokens, rows)
        return {"perf/mfu": flops / seconds / self.peak}


def peak_flops(device: torch.device) -> float | None:
    """None for a CPU, a GPU that the table does not know, and a slice of one (MIG)."""
    if device.type != "cuda":
        return None
    words = set(torch.cuda.get_device_name(device).replace("-", " ").split())
    known = (peak for name, peak in PEAK_FLOPS if name <= words)
    return None if "MIG" in words else next(known, None)


def _numbers(part: Mapping[str, Tensor]) -> dict[str, float]:
    """The same as numbers (one sync)."""
    return dict(zip(part, torch.stack(list(part.values())).tolist(), strict=True))


def _mean(values: Tensor) -> float:
    return float(values.double().nanmean())


def spread_of(values: Tensor) -> Tensor:
    """0-d: the standard deviation (n − 1) of those that are not NaN; 0 of fewer than two."""
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
