"""verl's policy losses (verl >= 0.9), computed with our kernels.

The functions have the same arguments and results as the policy losses of verl. Our kernels compute
the loss and its gradient, and verl's code computes the metrics.

    from grpo_fast.integrations.verl import register
    handle = register()  # then actor_rollout_ref.actor.policy_loss.loss_mode=fast_vanilla
    handle.undo()

verl's workers register the losses by importing `plugin`. There are two intended differences from
verl. A NaN at a masked token does not change the loss. The loss of a batch without active tokens is
0 instead of NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from grpo_fast import LossConfig, grpo_loss
from grpo_fast.errors import conflict, require
from grpo_fast.integrations.fast_head import FastHead

if TYPE_CHECKING:
    from verl.workers.config import ActorConfig

LOG_RATIO_BOUND = 20.0  # verl clamps the log importance ratio of a token to [-20, 20]
DPPO_RATIO_CAP = 20.0  # largest ratio in our dppo objectives
ALL_ROWS = "mean over all rows"  # verl's geo_mean always does this, whatever the mode


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
    """

    options: Callable[[ActorConfig], dict[str, Any]]
    advantages: Callable[[Batch, ActorConfig], Tensor] = weighted
    aggregation: str | None = None


def option(config: ActorConfig, name: str, default: object = None) -> Any:
    """Return an option of verl's config, or the default if the option is missing or None."""
    value = config.get(name, default) if hasattr(config, "get") else getattr(config, name, default)
    return default if value is None else value


def clip_range(config: ActorConfig) -> dict[str, float]:
    """Return the fields epsilon_low and epsilon_high of `LossConfig` for verl's clip range.

    verl's config has clip_ratio_low and clip_ratio_high, or clip_ratio for both bounds.
    """
    bounds = {}
    for side in ("low", "high"):
        value = option(config, f"clip_ratio_{side}", option(config, "clip_ratio"))
        fits = value is not None and value >= 0
        require(fits, f"clip_ratio_{side}", "a number >= 0 (or clip_ratio)", value)
        bounds[f"epsilon_{side}"] = value
    return bounds


def ratio_cap(config: ActorConfig, default: float, least: float = 0.0) -> float:
    """Return verl's clip_ratio_c, which must be greater than `least`."""
    cap = float(option(config, "clip_ratio_c", default))
    require(cap > least, "clip_ratio_c", f"a number > {least:g}", f"{cap:g}")
    return cap


def named(loss_type: str, **options: float | str) -> Callable[[ActorConfig], dict[str, Any]]:
    """Return a function that turns verl's config into fields of `LossConfig`.

    The fields are the given loss type, the given options, and the clip range of the config.
    """
    return lambda config: {"loss_type": loss_type, **options, **clip_range(config)}


def vanilla(config: ActorConfig) -> dict[str, Any]:
    return named("dual_clip", dual_clip_c=ratio_cap(config, 3.0, least=1.0))(config)


def sapo(config: ActorConfig) -> dict[str, Any]:
    pos, neg = (float(option(config, f"tau_{sign}")) for sign in ("pos", "neg"))
    return {"loss_type": "sapo", "sapo_temperature_pos": pos, "sapo_temperature_neg": neg}


def dro(config: ActorConfig) -> dict[str, Any]:
    beta = float(option(option(config, "policy_loss"), "dro_beta", 0.0))
    require(beta > 0, "policy_loss.dro_beta", "a number > 0", beta)
    return {"loss_type": "dro", "beta": beta}


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


# Map from each policy loss of verl to our equivalent objective. Our objectives have no weight for
# each token. The loss of a token is proportional to its advantage. If verl multiplies the loss by a
# weight, we therefore multiply the advantage by this weight.
LOSSES: dict[str, Recipe] = {
    "vanilla": Recipe(vanilla),
    "gspo": Recipe(named("gspo_token")),
    "cispo": Recipe(named("cispo", cispo_bound="offset")),
    "sapo": Recipe(sapo, aggregation="seq-mean-token-mean"),
    "geo_mean": Recipe(named("gmpo"), weighted_rows, ALL_ROWS),
    "dppo_tv": Recipe(named("dppo_tv"), weighted_to_cap),
    "dppo_kl": Recipe(named("dppo_kl"), weighted_to_cap),
    "gpg": Recipe(lambda _: {"loss_type": "reinforce"}),
    "dro": Recipe(dro, unweighted),
}

# Map from each loss_agg_mode of verl to our aggregation, and to the count in verl's
# `global_batch_info` by which the loss is divided. None: the loss is not divided.
AGGREGATION_MODES = {
    "token-mean": ("token_mean_global", "batch_num_tokens"),
    "token-sum": ("token_mean_global", None),
    "seq-mean-token-sum": ("sequence_sum", "global_batch_size"),
    "seq-mean-token-sum-norm": ("sequence_sum", "global_batch_size"),
    "seq-mean-token-mean": ("sequence_mean", "global_batch_size"),
}
GLOBAL_BATCH_INFO = ("dp_size", "batch_num_tokens", "global_batch_size", "loss_scale_factor")

PolicyLoss = Callable[..., tuple[Tensor, dict[str, float]]]


def normaliser(
    loss_agg_mode: str, mask: Tensor, info: dict[str, Any]
) -> tuple[str, dict[str, Any]]:
    """Translate verl's aggregation mode into arguments of `grpo_loss`.

    Args:
        loss_agg_mode: A key of `AGGREGATION_MODES`.
        mask: Response mask, shape (B, L).
        info: verl's `global_batch_info`. Its counts are over the batches of all ranks.

    Returns:
        The name of our aggregation, and the divisor of the loss as a keyword argument.

    Raises:
        ValueError: `info` has an unknown key, or it lacks the count that the mode needs and there
            are several ranks.
    """
    if loss_agg_mode == ALL_ROWS:
        return "sequence_mean", {"num_completions_in_batch": float(max(len(mask), 1))}
    unknown = sorted(set(info) - set(GLOBAL_BATCH_INFO))
    require(not unknown, "global_batch_info", f"{list(GLOBAL_BATCH_INFO)}", unknown)
    aggregation, name = AGGREGATION_MODES[loss_agg_mode]
    by_token = aggregation == "token_mean_global"
    ranks = info.get("dp_size", 1)
    count = 1.0 if name is None else info.get(name)
    if count is None:
        expected = f"the count of the whole batch for dp_size = {ranks}"
        require(ranks == 1, str(name), expected, None)
        count = (mask.sum() if by_token else (mask.sum(-1) > 0).sum()).clamp(min=1)
    if loss_agg_mode == "seq-mean-token-sum-norm":
        factor = info.get("loss_scale_factor")
        count = count * (mask.shape[-1] if factor is None else factor)
    total = "num_items_in_batch" if by_token else "num_completions_in_batch"
    return aggregation, {total: count / ranks}


def policy_loss(loss_mode: str) -> PolicyLoss:
    """Return a function that computes a policy loss of verl with our kernels.

    Args:
        loss_mode: A name in `LOSSES`. clip_cov and kl_cov are not supported, because they choose
            tokens by a covariance over the batch. bypass_mode is not supported, because it calls
            other losses by name.

    Returns:
        A function with verl's arguments. The tensors in its arguments have shape (B, L). It returns
        the loss (0-d, differentiable with respect to log_prob) and verl's metrics as floats.

    Raises:
        ValueError: `loss_mode` is not in `LOSSES`.
    """
    require(loss_mode in LOSSES, "loss_mode", f"one of {list(LOSSES)}", repr(loss_mode))
    from verl.trainer.ppo import core_algos

    recipe = LOSSES[loss_mode]
    theirs = getattr(core_algos, f"compute_policy_loss_{loss_mode}")

    def loss(
        old_log_prob: Tensor,  # (B, L)
        log_prob: Tensor,  # (B, L)
        advantages: Tensor,  # (B, L)
        response_mask: Tensor,  # (B, L) bool or 0/1
        loss_agg_mode: str = "token-mean",
        config: ActorConfig | None = None,
        rollout_is_weights: Tensor | None = None,  # (B, L) >= 0
    ) -> tuple[Tensor, dict[str, float]]:
        require(config is not None, "config", "verl's ActorConfig", None)
        mask = response_mask.bool()
        batch = Batch(old_log_prob, log_prob.detach(), advantages, mask, rollout_is_weights)
        info = dict(getattr(config, "global_batch_info", None) or {})
        expected = f"one of {list(AGGREGATION_MODES)}"
        require(loss_agg_mode in AGGREGATION_MODES, "loss_agg_mode", expected, repr(loss_agg_mode))
        aggregation, total = normaliser(recipe.aggregation or loss_agg_mode, response_mask, info)
        options = recipe.options(config)
        with torch.no_grad():
            weighted = recipe.advantages(batch, config)
            # Set masked log-probabilities to 0. verl multiplies them by the mask, so a NaN at a
            # masked token would change the importance ratio of its completion.
            old, new = (x.masked_fill(~mask, 0.0) for x in (old_log_prob, log_prob))
            _, metrics = theirs(old, new, advantages, response_mask, loss_agg_mode, config)
        output = grpo_loss(
            log_prob, weighted, LossConfig(**options, aggregation=aggregation),
            completion_mask=response_mask, **total,
            old_logps=None if loss_mode == "gpg" else old_log_prob,  # verl's gpg does not read it
        )  # fmt: skip
        return output.loss, metrics

    loss.__name__ = f"policy_loss_{loss_mode}"
    return loss


def register() -> FastHead:
    """Add all our losses to verl's registry in this process, as `fast_<name>`.

    Returns:
        A handle. Its `undo()` removes them.
    """
    from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY, register_policy_loss

    handle = FastHead()
    for name in LOSSES:
        register_policy_loss(f"fast_{name}")(policy_loss(name))
        handle.callback(POLICY_LOSS_REGISTRY.pop, f"fast_{name}", None)
    return handle
