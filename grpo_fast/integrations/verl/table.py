"""Table of verl's policy losses, with our objective and verl's metrics for each loss.

In every objective of this table, the loss of a token is proportional to its advantage. If verl
multiplies the loss of a token by a weight, we multiply the token's advantage by this weight.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from grpo_fast.errors import conflict, require

if TYPE_CHECKING:
    from verl.workers.config import ActorConfig

LOG_RATIO_BOUND = 20.0  # verl clamps the log importance ratio of a token to [-20, 20]
GSPO_BOUND = 10.0  # verl clamps the log ratio of a sequence to at most 10
DPPO_RATIO_CAP = 20.0  # largest ratio in our dppo objectives

Metrics = dict[str, Tensor]  # verl's metric name -> 0-d tensor
LossFields = dict[str, Any]  # fields of `LossConfig`


class Batch(NamedTuple):
    """Arguments of a policy loss. Each tensor has the shape (B, L) and does not require grad."""

    old_log_prob: Tensor
    log_prob: Tensor
    advantages: Tensor
    mask: Tensor  # bool
    rollout_is_weights: Tensor | None

    def mean(self, x: Tensor) -> Tensor:  # 0-d
        """Return the mean of `x` over all active tokens of the batch, 0-d."""
        # Select the active tokens with `where`. A product with the mask would keep a NaN at a
        # masked token, because NaN times 0 is NaN.
        return torch.where(self.mask, x, 0).sum() / self.mask.sum().clamp(min=1)

    def row_mean(self, x: Tensor) -> Tensor:  # (B, 1)
        """Return the mean of `x` over the active tokens of each completion, shape (B, 1)."""
        counts = self.mask.sum(-1, keepdim=True).clamp(min=1)
        return torch.where(self.mask, x, 0.0).sum(-1, keepdim=True) / counts

    def metrics(
        self, log_ratio: Tensor, above: Tensor | None = None, below: Tensor | None = None
    ) -> Metrics:
        """Return the metrics that verl logs for a clipped loss.

        Args:
            log_ratio: Log of the importance ratio, shape (B, L).
            above: True at tokens that verl's metric pg_clipfrac counts, shape (B, L), bool. None:
                no token.
            below: True at tokens that verl's metric pg_clipfrac_lower counts, shape (B, L), bool.
                None: no token.
        """
        nothing = log_ratio.new_zeros(())
        high = nothing if above is None else self.mean(above)
        low = nothing if below is None else self.mean(below)
        kl = -self.mean(log_ratio)
        return {"actor/pg_clipfrac": high, "actor/ppo_kl": kl, "actor/pg_clipfrac_lower": low}

    @property
    def raw_log_ratio(self) -> Tensor:
        return self.log_prob - self.old_log_prob

    @property
    def log_ratio(self) -> Tensor:
        return self.raw_log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


class Recipe(NamedTuple):
    """Functions that translate one of verl's losses to our objective and compute its metrics.

    Attributes:
        options: Function from verl's actor config to fields of `LossConfig`.
        metrics: Function from (batch, config) to verl's metrics.
        advantages: Function from (batch, config) to the advantages for `grpo_loss`.
        aggregation: The loss_agg_mode that verl always uses for this loss. None: verl uses the mode
            of the config.
        has_old: True if the objective reads old_log_prob.
    """

    options: Callable[[ActorConfig], LossFields]
    metrics: Callable[[Batch, ActorConfig], Metrics]
    advantages: Callable[[Batch, ActorConfig], Tensor]
    aggregation: str | None = None
    has_old: bool = True


def option(config: ActorConfig, name: str, default: object = None) -> Any:
    """Return an option of verl's config, or the default if the option is missing or None."""
    value = config.get(name, default) if hasattr(config, "get") else getattr(config, name, default)
    return default if value is None else value


def clip_range(config: ActorConfig) -> dict[str, float]:
    """Return epsilon_low and epsilon_high of `LossConfig` for verl's clip range.

    verl's config has clip_ratio_low and clip_ratio_high, or clip_ratio for both.
    """
    both = option(config, "clip_ratio")
    bounds = {}
    for side in ("low", "high"):
        value = option(config, f"clip_ratio_{side}", both)
        fits = value is not None and value >= 0
        require(fits, f"clip_ratio_{side}", "a number >= 0 (or clip_ratio)", value)
        bounds[f"epsilon_{side}"] = value
    return bounds


def ratio_cap(config: ActorConfig, default: float, least: float = 0.0) -> float:
    """Return verl's option clip_ratio_c. Raise a ValueError unless it is above `least`."""
    cap = float(option(config, "clip_ratio_c", default))
    require(cap > least, "clip_ratio_c", f"a number > {least:g}", f"{cap:g}")
    return cap


def named(loss_type: str, **options: float | str) -> Callable[[ActorConfig], LossFields]:
    """Return a function from verl's config to fields of `LossConfig`.

    The fields are the loss type, `options`, and the clip range of the config.
    """
    return lambda config: {"loss_type": loss_type, **options, **clip_range(config)}


def vanilla(config: ActorConfig) -> LossFields:
    """Return the fields of `LossConfig` for PPO with dual clip."""
    return named("dual_clip", dual_clip_c=ratio_cap(config, 3.0, least=1.0))(config)


def sapo(config: ActorConfig) -> LossFields:
    """Return the fields of `LossConfig` for SAPO."""
    pos, neg = (float(option(config, f"tau_{sign}")) for sign in ("pos", "neg"))
    return {"loss_type": "sapo", "sapo_temperature_pos": pos, "sapo_temperature_neg": neg}


def dro(config: ActorConfig) -> LossFields:
    """Return the fields of `LossConfig` for DRO."""
    beta = option(option(config, "policy_loss"), "dro_beta")
    fits = beta is not None and beta > 0
    require(fits, "policy_loss.dro_beta", "a number > 0", beta)
    return {"loss_type": "dro", "beta": float(beta)}


def weighted(batch: Batch, config: ActorConfig) -> Tensor:
    """Return each token's advantage, multiplied by its rollout importance weight, (B, L)."""
    weights = batch.rollout_is_weights
    return batch.advantages if weights is None else batch.advantages * weights


def weighted_rows(batch: Batch, config: ActorConfig) -> Tensor:
    """Return the advantages, multiplied by the geometric mean of each completion's weights.

    The weights are verl's importance weights of the rollout (`rollout_is_weights`).

    Raises:
        ValueError: The advantage is 0 at some tokens of a completion, but not at all of them.
    """
    a = batch.advantages
    has_gaps = ((a == 0) & batch.mask & (batch.row_mean(a.abs()) > 0)).any()
    expected = "one for a completion (geo_mean)"
    require(not has_gaps, "advantages", expected, "single tokens with 0")
    if batch.rollout_is_weights is None:
        return a
    return a * torch.exp(batch.row_mean(torch.log(batch.rollout_is_weights + 1e-10)))


def weighted_to_cap(batch: Batch, config: ActorConfig) -> Tensor:
    """Return the advantages for dppo, multiplied by the importance weights and by a correction.

    verl caps the importance ratio at `clip_ratio_c`, and our objective caps it at `DPPO_RATIO_CAP`.
    The correction changes our cap to verl's cap.
    """
    ratio = batch.log_ratio.exp()
    theirs = ratio.clamp(max=ratio_cap(config, 20.0))
    ours = ratio.clamp(max=DPPO_RATIO_CAP)
    return weighted(batch, config) * (theirs / ours)


def unweighted(batch: Batch, config: ActorConfig) -> Tensor:
    """Return the advantages. Raise a ValueError if the batch has importance weights."""
    if batch.rollout_is_weights is not None:
        raise conflict("rollout_is_weights", "dro", "its quadratic term has one weight; pass None")
    return batch.advantages


def outside_clip(ratio: Tensor, batch: Batch, config: ActorConfig) -> Tensor:
    """Return a bool mask of the tokens whose loss is clipped, (B, L).

    A token is clipped if its ratio left the clip range in the direction of its advantage.
    """
    low, high = clip_range(config).values()
    a = batch.advantages
    return ((a > 0) & (ratio > 1 + high)) | ((a < 0) & (ratio < 1 - low))


def clipped_twice(batch: Batch, config: ActorConfig) -> Metrics:
    """Return verl's metrics for PPO with dual clip."""
    ratio = batch.log_ratio.exp()
    low, high = clip_range(config).values()
    at_least = torch.maximum(ratio, ratio.clamp(1 - low, 1 + high))
    lower = (at_least > ratio_cap(config, 3.0, least=1.0)) & (batch.advantages < 0)
    return batch.metrics(batch.log_ratio, outside_clip(ratio, batch, config), lower)


def clipped_by_completion(batch: Batch, config: ActorConfig) -> Metrics:
    """Return verl's metrics for GSPO.

    The importance ratio of GSPO is the geometric mean of the token ratios of a completion.
    """
    ratio = batch.row_mean(batch.raw_log_ratio).clamp(max=GSPO_BOUND).exp()
    return batch.metrics(batch.raw_log_ratio, outside_clip(ratio, batch, config))


def clipped_by_token(batch: Batch, config: ActorConfig) -> Metrics:
    """Return verl's metrics for geo_mean. This loss clips the log ratio of each token."""
    log_ratio = batch.raw_log_ratio
    low, high = clip_range(config).values()
    a = batch.advantages
    clipped = (log_ratio < -low) | (log_ratio > high)
    return batch.metrics(log_ratio, clipped & (a > 0), clipped & (a < 0))


def clipped_weight(batch: Batch, config: ActorConfig) -> Metrics:
    """Return verl's metrics for CISPO. This loss clips the weight of a token on both sides."""
    ratio = batch.log_ratio.exp()
    low, high = clip_range(config).values()
    return batch.metrics(batch.log_ratio, (ratio < 1 - low) | (ratio > 1 + high))


def too_far(
    distance: Callable[[Tensor, Tensor], Tensor],
) -> Callable[[Batch, ActorConfig], Metrics]:
    """Return a function that computes verl's metrics for dppo.

    dppo masks a token if its new probability is far from its old probability, and the update would
    move the new probability further away.

    Args:
        distance: Function that returns the distance between the new and the old probability.
    """

    def metrics(batch: Batch, config: ActorConfig) -> Metrics:
        low, high = clip_range(config).values()
        p, p_old, is_good = batch.log_prob.exp(), batch.old_log_prob.exp(), batch.advantages > 0
        far = distance(p, p_old)
        outside = torch.where(is_good, (far > high) & (p > p_old), (far > low) & (p < p_old))
        capped = (batch.log_ratio.exp() > ratio_cap(config, 20.0)) & ~outside
        return batch.metrics(batch.log_ratio, outside, capped)

    return metrics


def binary_kl(p: Tensor, p_old: Tensor) -> Tensor:
    """Return the divergence KL(old ‖ new) over two outcomes: the token itself or any other."""
    others = (1 - p_old + 1e-8) / (1 - p + 1e-8)
    return p_old * (p_old.log() - p.log()) + (1 - p_old) * torch.log(others)


LOSSES: dict[str, Recipe] = {
    "vanilla": Recipe(vanilla, clipped_twice, weighted),
    "gspo": Recipe(named("gspo_token"), clipped_by_completion, weighted),
    "cispo": Recipe(named("cispo", cispo_bound="offset"), clipped_weight, weighted),
    "sapo": Recipe(sapo, lambda x, _: x.metrics(x.log_ratio), weighted, "seq-mean-token-mean"),
    "geo_mean": Recipe(named("gmpo"), clipped_by_token, weighted_rows, "mean over all rows"),
    "dppo_tv": Recipe(named("dppo_tv"), too_far(lambda p, q: (p - q).abs()), weighted_to_cap),
    "dppo_kl": Recipe(named("dppo_kl"), too_far(binary_kl), weighted_to_cap),
    "gpg": Recipe(lambda _: {"loss_type": "reinforce"}, lambda *_: {}, weighted, has_old=False),
    "dro": Recipe(dro, lambda x, _: {"actor/ppo_kl": -x.mean(x.raw_log_ratio)}, unweighted),
}
