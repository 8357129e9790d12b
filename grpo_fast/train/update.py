"""The gradients of one optimizer step, micro-batch by micro-batch."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from grpo_fast import LossConfig, LossOutput, grpo_loss, linear_grpo_loss
from grpo_fast.train.batch import MicroBatch
from grpo_fast.train.metrics import LossMetrics
from grpo_fast.train.policy import Policy


class Seen(NamedTuple):
    """What an optimizer step's forward passes showed."""

    losses: LossMetrics
    logps: list[Tensor]  # of the active tokens, micro-batch by micro-batch
    sampling_logps: list[Tensor]  # of the same tokens, by the sampler


def accumulate(
    policy: Policy, minibatch: list[MicroBatch], config: LossConfig, *, correct_sampling: bool, validate: str
) -> Seen:
    """Add up the gradients: the normalisers are the whole step's, so the micro-batches' losses simply add.

    Args:
        correct_sampling: hand the sampler's logps to the loss.
        validate: as in `linear_grpo_loss`.
    """
    items = max(1, sum(batch.active_tokens for batch in minibatch))
    completions = sum(len(batch) for batch in minibatch)
    # token_mean_local is local by definition: its micro-batches are averaged.
    share = 1 / len(minibatch) if config.aggregation == "token_mean_local" else 1.0
    seen = Seen(LossMetrics(), [], [])
    for batch in minibatch:
        packed, head = batch.packed, policy.head
        per_token: dict[str, Any] = dict(
            completion_mask=batch.completion_mask, cu_seqlens=packed.cu_seqlens, old_logps=batch.old_logps,
            ref_logps=batch.ref_logps, sampling_logps=batch.sampling_logps if correct_sampling else None,
            num_items_in_batch=items, num_completions_in_batch=completions,
        )  # fmt: skip
        output = linear_grpo_loss(
            policy.hidden(packed), head.weight, packed.target_ids, batch.advantages,
            config.replace(**head.rule), hidden_rows=packed.predicting, bias=head.bias, validate=validate, **per_token,
        )  # fmt: skip
        (output.loss * share).backward()
        metrics = {"loss": output.loss, **output.metrics}
        if not is_policy_alone(config):
            metrics["policy_logp_grad_norm"] = share * policy_gradient(output, batch.advantages, config, per_token)
        seen.losses.add(metrics, batch.active_tokens, share)
        seen.logps.append(output.logps[batch.completion_mask])
        seen.sampling_logps.append(batch.sampling_logps[batch.completion_mask])
    seen.losses.optimizer_steps = 1
    return seen


def is_policy_alone(config: LossConfig) -> bool:
    """Whether the policy term is the whole loss: no KL term, no entropy bonus."""
    return not config.uses_reference and config.entropy_coef == 0


def policy_gradient(output: LossOutput, advantages: Tensor, config: LossConfig, per_token: dict) -> Tensor:
    """0-d: the L2 norm of the policy term's gradient with respect to the tokens' logps.

    With respect to the parameters it would take a second backward pass; this takes one over the tokens.
    """
    alone = config.replace(entropy_coef=0.0, beta=0.0 if config.uses_reference else config.beta)
    logps = output.logps.detach().requires_grad_()
    with torch.enable_grad():
        loss = grpo_loss(logps, advantages, alone, entropy=output.entropy, **per_token).loss
    return torch.autograd.grad(loss, logps)[0].norm()
