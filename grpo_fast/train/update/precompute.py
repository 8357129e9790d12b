"""Columns that are computed once and used by all updates of a step, such as old log-probs."""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_fast import LossConfig
from grpo_fast.objective.kl import EXACT
from grpo_fast.rollout.vllm.teacher import TeacherServer
from grpo_fast.train.config import DistillConfig
from grpo_fast.train.models.policy import Policy
from grpo_fast.train.models.reference import Reference
from grpo_fast.train.ranks.distributed import together
from grpo_fast.train.update.batch import FIXED, MicroBatch, StepBatch
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
    distill: DistillConfig | None = None,
    server: TeacherServer | None = None,
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
        distill: the section `distill`. With `form: advantage` the log ratio of teacher and policy
            is added to the advantages.
        server: a teacher's server, which is used instead of the reference.
    """
    if batch.has_fixed:
        return
    following = None
    temperature = float(loss.temperature)
    by_advantage = distill is not None and distill.form == "advantage"
    by_loss = distill is not None and not by_advantage
    keep_old = keep_old or by_advantage or reward_beta is not None
    with together(in_step=policy.is_sharded):
        for micro in batch.micro_batches:
            # 1. Evaluate the reference model. An exact divergence needs the hidden states of the
            # reference. All other estimators need its log-probs.
            if reference is not None and (by_loss or loss.kl_estimator in EXACT):
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
            # 3. Request the log-probs of the teacher from its server, and evaluate the critic.
            if server is not None:
                given = scores_of(server, micro)
                if by_advantage:
                    micro.write("ref_logps", given[:, 0, 1])
                else:
                    micro.write("teacher", given)
            if critic is not None:
                micro.write("values", critic.values(micro.packed, hidden))
        if critic is not None and critic.config.bootstrap:
            following = critic.values_after_the_end(batch)
    # 4. Compute advantages per token.
    if critic is not None:
        batch.exchange(FIXED)
        critic.estimate_advantages(batch, reward_beta, loss.kl_estimator, following)
    elif distill is not None and by_advantage:
        batch.exchange(FIXED)
        batch.samples.token_advantages = teacher_advantages(batch, distill.coef)
    batch.has_fixed = True


def scores_of(server: TeacherServer, micro: MicroBatch) -> Tensor:
    """Request the teacher's log-probs of a micro-batch from its server.

    Returns:
        Tensor of shape (R, K + 1, 2) with ids and log-probs. Index 0 of the second dimension is the
        sampled token. The other indices are the K likeliest tokens.
    """
    samples = micro.samples
    texts = [
        (torch.cat([samples.prompt(i), samples.completion(i)]).tolist(), samples.prompt_lengths[i])
        for i in micro.chosen
    ]
    return torch.cat(server.scores(texts)).to(micro.rows.device)


def teacher_advantages(batch: StepBatch, coef: float) -> Tensor:
    """Return the advantage of each token for distillation from a teacher, shape (R,).

    The advantage is coef · (log q - log p) plus the advantage of the sample. q and p are the
    probabilities of the token under the teacher and under the policy. The advantage of a sample
    without a reward counts as 0.
    """
    samples = batch.samples
    assert samples.ref_logps is not None and samples.old_logps is not None
    scores = batch.advantages.float().nan_to_num(nan=0.0)
    by_token = scores.repeat_interleave(torch.tensor(samples.lengths))
    return coef * (samples.ref_logps - samples.old_logps) + by_token.to(samples.ref_logps)
