"""Table of the policy losses of verl, with our equivalent objective for each loss.

Our objectives have no weight for each token. The loss of a token is proportional to its advantage.
If verl multiplies the loss by a weight, we therefore multiply the advantage by this weight.
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
DPPO_RATIO_CAP = 20.0  # largest ratio in our dppo objectives

LossFields = dict[str, Any]  # fields of `LossConfig`


class Batch(NamedTuple):
    """Tensors that verl passes to a policy loss, each of shape (B, L) and without gradient."""

    old_log_prob: Tensor
    log_prob: Tensor
    advantages: Tensor
    mask: Tensor  # bool
    rollout_is_weights: Tensor | None


def weighted(batch: Batch, config: ActorConfig) -> Tensor:
    """Return the advantages, multiplied by the rollout importance weights if verl passes them."""
    weights = batch.rollout_is_weights
    return batch.advantages if weights is None else batch.advantages * weights


class Recipe(NamedTuple):
    """Translation of one policy loss of verl to arguments of `grpo_loss`.

    Attributes:
        options: Function that turns verl's actor config into fields of `LossConfig`.
        advantages: Function that turns a batch and the config into advantages for `grpo_loss`.
        aggregation: The loss_agg_mode that verl always uses for this loss, or None if verl reads it
            from its config.
        has_old: True if the objective reads old_log_prob.
    """

    options: Callable[[ActorConfig], LossFields]
    advantages: Callable[[Batch, ActorConfig], Tensor] = weighted
    aggregation: str | None = None
    has_old: bool = True


def option(config: ActorConfig, name: str, default: object = None) -> Any:
    """Return an option of verl's config, or the default if the option is missing or None."""
    value = config.get(name, default) if hasattr(config, "get") else getattr(config, name, default)
    return default if value is None else value


def clip_range(config: ActorConfig) -> dict[str, float]:
    """Return the fields epsilon_low and epsilon_high of `LossConfig` for verl's clip range.

    verl's config has clip_ratio_low and clip_ratio_high, or clip_ratio for both bounds.
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
    """Return verl's clip_ratio_c, which must be greater than `least`."""
    cap = float(option(config, "clip_ratio_c", default))
    require(cap > least, "clip_ratio_c", f"a number > {least:g}", f"{cap:g}")
    return cap


def named(loss_type: str, **options: float | str) -> Callable[[ActorConfig], LossFields]:
    """Return a function that turns verl's config into fields of `LossConfig`.

    The fields are the given loss type, the given options, and the clip range of the config.
    """
    return lambda config: {"loss_type": loss_type, **options, **clip_range(config)}


def vanilla(config: ActorConfig) -> LossFields:
    return named("dual_clip", dual_clip_c=ratio_cap(config, 3.0, least=1.0))(config)


def sapo(config: ActorConfig) -> LossFields:
    pos, neg = (float(option(config, f"tau_{sign}")) for sign in ("pos", "neg"))
    return {"loss_type": "sapo", "sapo_temperature_pos": pos, "sapo_temperature_neg": neg}


def dro(config: ActorConfig) -> LossFields:
    beta = option(option(config, "policy_loss"), "dro_beta")
    fits = beta is not None and beta > 0
    require(fits, "policy_loss.dro_beta", "a number > 0", beta)
    return {"loss_type": "dro", "beta": float(beta)}


def weighted_rows(batch: Batch, config: ActorConfig) -> Tensor:
    """Return the advantages of geo_mean, multiplied by one weight for each completion.

    The weight is the geometric mean of the completion's rollout importance weights.

    Raises:
        ValueError: The advantage is 0 at some tokens of a completion, but not at all of them.
    """
    mask = batch.mask
    is_zero = batch.advantages == 0
    has_zeros = (is_zero & mask).any(-1) & (~is_zero & mask).any(-1)
    expected = "one for a completion (geo_mean)"
    require(not has_zeros.any(), "advantages", expected, "single tokens with 0")
    if batch.rollout_is_weights is None:
        return batch.advantages
    logs = torch.where(mask, torch.log(batch.rollout_is_weights + 1e-10), 0.0)
    mean = logs.sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)
    return batch.advantages * mean.exp()


def weighted_to_cap(batch: Batch, config: ActorConfig) -> Tensor:
    """Return the advantages of dppo, multiplied by the rollout weights and by a correction.

    verl limits the importance ratio to `clip_ratio_c`, and our objective limits it to
    `DPPO_RATIO_CAP`. The correction is verl's limited ratio divided by our limited ratio.
    """
    log_ratio = batch.log_prob - batch.old_log_prob
    ratio = log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
    theirs = ratio.clamp(max=ratio_cap(config, 20.0))
    ours = ratio.clamp(max=DPPO_RATIO_CAP)
    return weighted(batch, config) * (theirs / ours)


def unweighted(batch: Batch, config: ActorConfig) -> Tensor:
    """Return the advantages of dro. Raise a ValueError if verl passes rollout weights."""
    if batch.rollout_is_weights is not None:
        raise conflict("rollout_is_weights", "dro", "its quadratic term has one weight; pass None")
    return batch.advantages


LOSSES: dict[str, Recipe] = {
    "vanilla": Recipe(vanilla),
    "gspo": Recipe(named("gspo_token")),
    "cispo": Recipe(named("cispo", cispo_bound="offset")),
    "sapo": Recipe(sapo, aggregation="seq-mean-token-mean"),
    "geo_mean": Recipe(named("gmpo"), weighted_rows, "mean over all rows"),
    "dppo_tv": Recipe(named("dppo_tv"), weighted_to_cap),
    "dppo_kl": Recipe(named("dppo_kl"), weighted_to_cap),
    "gpg": Recipe(lambda _: {"loss_type": "reinforce"}, has_old=False),
    "dro": Recipe(dro, unweighted),
}
