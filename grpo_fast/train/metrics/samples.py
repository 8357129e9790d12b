"""Metrics of what was sampled: rewards, lengths, the sets that tokens were drawn from."""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_fast.rewards.reward_set import RewardResult
from grpo_fast.rollout import Rollout


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


def spread_of(values: Tensor) -> Tensor:
    """0-d: the standard deviation (n − 1) of those that are not NaN; 0 of fewer than two."""
    values = values[~values.isnan()]
    if values.numel() < 2 or bool((values == values[0]).all()):
        return torch.zeros((), dtype=torch.float64)
    return values.std()


def _mean(values: Tensor) -> float:
    return float(values.double().nanmean())
