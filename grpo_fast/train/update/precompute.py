"""Columns that are computed once and used by all updates of a step, such as old log-probs."""

from __future__ import annotations

import torch

from grpo_fast import LossConfig
from grpo_fast.objective.kl import EXACT
from grpo_fast.train.models.policy import Policy
from grpo_fast.train.models.reference import Reference
from grpo_fast.train.ranks.distributed import together
from grpo_fast.train.update.batch import FIXED, StepBatch
from grpo_fast.train.update.critic import Critic


@torch.no_grad()
def precompute(
    batch: StepBatch,
    policy: Policy,
    loss: LossConfig,
    *,
    keep_old: bool,
    reference: Reference | None = None,
    critic: Critic | None = None,
    reward_beta: float | None = None,
) -> None:
    """Compute the columns in `FIXED` with the current weights, unless the batch already has them.

    Args:
        batch: the samples of a step.
        policy: the policy.
        loss: configuration of the loss, which sets the temperature and the KL estimator.
        keep_old: if True, compute the old log-probs, which are the policy's log-probs before the
            first update. A step with a single update does not need them, because its ratio is
            exactly 1.
        reference: the reference model, or None.
        critic: the value function, or None.
        reward_beta: weight of the KL divergence in the rewards. If it is None, the rewards do not
            contain a KL divergence.
    """
    if batch.has_fixed:
        return
    following = None
    temperature = float(loss.temperature)
    keep_old = keep_old or reward_beta is not None
    with together(in_step=policy.is_sharded):
        for micro in batch.micro_batches:
            # 1. Evaluate the reference model. An exact divergence needs the hidden states of the
            # reference. All other estimators need its log-probs.
            if reference is not None and loss.kl_estimator in EXACT:
                micro.write("ref_hidden", reference.hidden(micro.packed))
            elif reference is not None:
                logps = reference.logps(micro.packed, temperature, micro.support)
                micro.write("ref_logps", logps)
            # 2. Evaluate the policy. A shared critic uses the same hidden states.
            hidden = None
            if keep_old or (critic is not None and critic.is_shared):
                hidden = policy.hidden(micro.packed)
            if keep_old:
                logps = policy.logps(micro.packed, temperature, hidden, micro.support)
                micro.write("old_logps", logps)
            # 3. Evaluate the critic.
            if critic is not None:
                micro.write("values", critic.values(micro.packed, hidden))
        if critic is not None and critic.config.bootstrap:
            following = critic.values_after_the_end(batch)
    # 4. Compute advantages per token.
    if critic is not None:
        batch.exchange(FIXED)
        critic.estimate_advantages(batch, reward_beta, loss.kl_estimator, following)
    batch.has_fixed = True
