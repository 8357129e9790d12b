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
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from grpo_fast import LossConfig, grpo_loss
from grpo_fast.errors import require
from grpo_fast.integrations.fast_head import FastHead
from grpo_fast.integrations.verl.table import LOSSES, Batch

if TYPE_CHECKING:
    from verl.workers.config import ActorConfig

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
        if recipe.aggregation == "mean over all rows":
            aggregation = "sequence_mean"
            total: dict[str, Any] = {"num_completions_in_batch": float(max(len(log_prob), 1))}
        else:
            mode = recipe.aggregation or loss_agg_mode
            aggregation, total = normaliser(mode, response_mask, info)
        options = recipe.options(config)
        with torch.no_grad():
            weighted = recipe.advantages(batch, config)
            # Set masked log-probabilities to 0. verl multiplies them by the mask, so a NaN at a
            # masked token would change the importance ratio of its completion.
            old, new = (x.masked_fill(~mask, 0.0) for x in (old_log_prob, log_prob))
            _, metrics = theirs(old, new, advantages, response_mask, loss_agg_mode, config)
        output = grpo_loss(
            log_prob, weighted, LossConfig(**options, aggregation=aggregation),
            completion_mask=response_mask, old_logps=old_log_prob if recipe.has_old else None,
            **total,
        )  # fmt: skip
        return output.loss, metrics

    loss.__name__ = f"policy_loss_{loss_mode}"
    return loss


def register(prefix: str = "fast_") -> FastHead:
    """Add all our losses to verl's registry in this process.

    If you call this function several times, undo the handles in reverse order.

    Args:
        prefix: Prefix of each name. With "", our losses replace verl's losses until `undo()`.

    Returns:
        A handle. Its `undo()` restores verl's registry.
    """
    require(isinstance(prefix, str), "prefix", "a string", repr(prefix))
    from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY, register_policy_loss

    handle = FastHead()
    for name in LOSSES:
        before = POLICY_LOSS_REGISTRY.get(prefix + name)
        if before is None:
            handle.callback(POLICY_LOSS_REGISTRY.pop, prefix + name)
        else:
            handle.callback(POLICY_LOSS_REGISTRY.__setitem__, prefix + name, before)
        register_policy_loss(prefix + name)(policy_loss(name))
    return handle
