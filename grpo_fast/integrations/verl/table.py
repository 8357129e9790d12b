"""verl's policy losses by name: which of our objectives each is, and verl's own metrics of it.

Every objective here is homogeneous in the advantage, so whatever verl multiplies the loss of a
token by (importance weights of the rollout, a truncated ratio without gradient) goes into its
advantage, exactly.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

LOG_RATIO_BOUND = 20.0  # verl clamps the log ratio here
GSPO_BOUND = 10.0  # and the one of a sequence here
DPPO_RATIO_CAP = 20.0  # of our dppo objectives

Metrics = tuple[tuple[str, ...], Tensor]
NAMES = ("actor/pg_clipfrac", "actor/ppo_kl", "actor/pg_clipfrac_lower")


class Batch(NamedTuple):
    """The arguments of a policy loss, all (B, L), without gradient."""

    old_log_prob: Tensor
    log_prob: Tensor
    advantages: Tensor
    mask: Tensor
    rollout_is_weights: Tensor | None

    def mean(self, x: Tensor) -> Tensor:
        """The mean over the tokens of the mask, 0 without one."""
        keep = self.mask.bool()
        kept = x & keep if x.dtype == torch.bool else torch.where(keep, x, 0.0)
        return kept.sum() / keep.sum().clamp(min=1)

    def row_mean(self, x: Tensor) -> Tensor:
        """(B, 1): the mean over each completion, 0 where it is empty."""
        keep = self.mask.bool()
        return torch.where(keep, x, 0.0).sum(-1, keepdim=True) / keep.sum(-1, keepdim=True).clamp(
            min=1
        )

    @property
    def raw_log_ratio(self) -> Tensor:
        return self.log_prob - self.old_log_prob

    @property
    def log_ratio(self) -> Tensor:
        return self.raw_log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


class Recipe(NamedTuple):
    """One of verl's losses.

    Attributes:
        options: verl's actor config → fields of `LossConfig`.
        metrics: (batch, config) → names and values.
        advantages: (batch, config) → what `grpo_loss` gets as advantages.
        aggregation: the loss_agg_mode verl uses whatever the config says; None: the config's.
        has_old: whether the objective reads old_log_prob.
    """

    options: Callable[[Any], dict[str, Any]]
    metrics: Callable[[Batch, Any], Metrics]
    advantages: Callable[[Batch, Any], Tensor]
    aggregation: str | None = None
    has_old: bool = True

    def old_logps(self, batch: Batch) -> Tensor | None:
        return batch.old_log_prob if self.has_old else None


# ------------------------------------------------------------------------------------------------
# options


def option(config: Any, name: str, default: Any = None) -> Any:
    """A field of verl's ActorConfig or of an omegaconf config."""
    value = config.get(name, default) if hasattr(config, "get") else getattr(config, name, default)
    return default if value is None else value


def clip_range(config: Any) -> dict[str, Any]:
    """epsilon_low and epsilon_high: verl's clip_ratio_low and clip_ratio_high, else clip_ratio."""
    low, high = option(config, "clip_ratio_low"), option(config, "clip_ratio_high")
    both = option(config, "clip_ratio")
    low, high = both if low is None else low, both if high is None else high
    for name, value in (("clip_ratio_low", low), ("clip_ratio_high", high)):
        if value is None or not value >= 0:
            raise ValueError(f"{name}: expected a number >= 0 (or clip_ratio), got {value!r}")
    return {"epsilon_low": low, "epsilon_high": high}


def ratio_cap(config: Any, default: float, least: float = 0.0) -> float:
    cap = float(option(config, "clip_ratio_c", default))
    if not cap > least:
        raise ValueError(f"clip_ratio_c: expected a number > {least:g}, got {cap:g}")
    return cap


def named(loss_type: str) -> Callable[[Any], dict[str, Any]]:
    return lambda config: {"loss_type": loss_type, **clip_range(config)}


def vanilla(config: Any) -> dict[str, Any]:
    return {
        "loss_type": "dual_clip",
        "dual_clip_c": ratio_cap(config, 3.0, least=1.0),
        **clip_range(config),
    }


def cispo(config: Any) -> dict[str, Any]:
    return {"loss_type": "cispo", "cispo_bound": "offset", **clip_range(config)}


def sapo(config: Any) -> dict[str, Any]:
    temperatures = {
        f"sapo_temperature_{sign}": float(option(config, f"tau_{sign}")) for sign in ("pos", "neg")
    }
    return {"loss_type": "sapo", **temperatures}


def dro(config: Any) -> dict[str, Any]:
    beta = option(option(config, "policy_loss"), "dro_beta")
    if beta is None or not beta > 0:
        raise ValueError(f"policy_loss.dro_beta: expected a number > 0, got {beta!r}")
    return {"loss_type": "dro", "beta": float(beta)}


# ------------------------------------------------------------------------------------------------
# advantages


def weighted(batch: Batch, config: Any) -> Tensor:
    """A times the importance weight of the rollout."""
    return (
        batch.advantages
        if batch.rollout_is_weights is None
        else batch.advantages * batch.rollout_is_weights
    )


def weighted_rows(batch: Batch, config: Any) -> Tensor:
    """A times the geometric mean of the completion's importance weights (geo_mean)."""
    keep, a = batch.mask.bool(), batch.advantages
    if ((a == 0) & keep & (batch.row_mean(a.abs()) > 0)).any():
        raise ValueError(
            "advantages: geo_mean expects one advantage per completion, got single tokens with 0"
        )
    if batch.rollout_is_weights is None:
        return a
    return a * torch.exp(batch.row_mean(torch.log(batch.rollout_is_weights + 1e-10)))


def weighted_to_cap(batch: Batch, config: Any) -> Tensor:
    """A times the importance weight, and times what makes our min(r, 20) verl's min(r,
    clip_ratio_c).
    """
    ratio = batch.log_ratio.exp()
    return weighted(batch, config) * (
        ratio.clamp(max=ratio_cap(config, 20.0)) / ratio.clamp(max=DPPO_RATIO_CAP)
    )


def unweighted(batch: Batch, config: Any) -> Tensor:
    if batch.rollout_is_weights is not None:
        raise ValueError(
            "rollout_is_weights: dro expects None (its quadratic term has one weight), got a tensor"
        )
    return batch.advantages


# ------------------------------------------------------------------------------------------------
# metrics


def fractions(
    batch: Batch, clipped: Tensor | None, lower: Tensor | None, log_ratio: Tensor
) -> Metrics:
    """verl's three metrics: fractions of tokens (0 for None), and the mean of -log r."""
    nothing = log_ratio.new_zeros(())
    low, high = (nothing if x is None else batch.mean(x) for x in (lower, clipped))
    return NAMES, torch.stack([high, -batch.mean(log_ratio), low])


def beyond(ratio: Tensor, batch: Batch, config: Any) -> Tensor:
    """Where the ratio left the clip range on the side its advantage pushes to."""
    low, high = clip_range(config).values()
    a = batch.advantages
    return ((a > 0) & (ratio > 1 + high)) | ((a < 0) & (ratio < 1 - low))


def vanilla_metrics(batch: Batch, config: Any) -> Metrics:
    log_ratio = batch.log_ratio
    ratio = log_ratio.exp()
    low, high = clip_range(config).values()
    at_least = torch.maximum(ratio, ratio.clamp(1 - low, 1 + high))
    lower = (at_least > ratio_cap(config, 3.0, least=1.0)) & (batch.advantages < 0)
    return fractions(batch, beyond(ratio, batch, config), lower, log_ratio)


def gspo_metrics(batch: Batch, config: Any) -> Metrics:
    log_ratio = batch.raw_log_ratio
    ratio = batch.row_mean(log_ratio).clamp(max=GSPO_BOUND).exp()
    return fractions(batch, beyond(ratio, batch, config), None, log_ratio)


def sapo_metrics(batch: Batch, config: Any) -> Metrics:
    return fractions(batch, None, None, batch.log_ratio)


def geo_mean_metrics(batch: Batch, config: Any) -> Metrics:
    low, high = clip_range(config).values()
    log_ratio, a = batch.raw_log_ratio, batch.advantages
    clipped = (log_ratio < -low) | (log_ratio > high)
    return fractions(batch, clipped & (a > 0), clipped & (a < 0), log_ratio)


def cispo_metrics(batch: Batch, config: Any) -> Metrics:
    low, high = clip_range(config).values()
    log_ratio = batch.log_ratio
    ratio = log_ratio.exp()
    return fractions(batch, (ratio < 1 - low) | (ratio > 1 + high), None, log_ratio)


def dppo_metrics(
    batch: Batch, config: Any, distance: Callable[[Tensor, Tensor], Tensor]
) -> Metrics:
    low, high = clip_range(config).values()
    p, p_old = batch.log_prob.exp(), batch.old_log_prob.exp()
    far = distance(p, p_old)
    left = torch.where(batch.advantages > 0, (far > high) & (p > p_old), (far > low) & (p < p_old))
    log_ratio = batch.log_ratio
    capped = (log_ratio.exp() > ratio_cap(config, 20.0)) & ~left
    return fractions(batch, left, capped, log_ratio)


def total_variation(p: Tensor, p_old: Tensor) -> Tensor:
    return (p - p_old).abs()


def binary_kl(p: Tensor, p_old: Tensor) -> Tensor:
    """KL of (p_old, 1 - p_old) from (p, 1 - p), with verl's 1e-8."""
    return p_old * (p_old.log() - p.log()) + (1 - p_old) * torch.log(
        (1 - p_old + 1e-8) / (1 - p + 1e-8)
    )


def dppo_tv_metrics(batch: Batch, config: Any) -> Metrics:
    return dppo_metrics(batch, config, total_variation)


def dppo_kl_metrics(batch: Batch, config: Any) -> Metrics:
    return dppo_metrics(batch, config, binary_kl)


def dro_metrics(batch: Batch, config: Any) -> Metrics:
    return NAMES[1:2], batch.mean(-batch.raw_log_ratio)[None]


def no_metrics(batch: Batch, config: Any) -> Metrics:
    return (), batch.advantages.new_empty(0)


LOSSES: dict[str, Recipe] = {
    "vanilla": Recipe(vanilla, vanilla_metrics, weighted),
    "gspo": Recipe(named("gspo_token"), gspo_metrics, weighted),
    "cispo": Recipe(cispo, cispo_metrics, weighted),
    "sapo": Recipe(sapo, sapo_metrics, weighted, aggregation="seq-mean-token-mean"),
    "geo_mean": Recipe(
        named("gmpo"), geo_mean_metrics, weighted_rows, aggregation="mean over all rows"
    ),
    "dppo_tv": Recipe(named("dppo_tv"), dppo_tv_metrics, weighted_to_cap),
    "dppo_kl": Recipe(named("dppo_kl"), dppo_kl_metrics, weighted_to_cap),
    "gpg": Recipe(lambda config: {"loss_type": "reinforce"}, no_metrics, weighted, has_old=False),
    "dro": Recipe(dro, dro_metrics, unweighted),
}
