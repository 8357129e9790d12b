"""Tensors that stay fixed over all updates on a batch: old and reference logps, values, GAE."""

from __future__ import annotations

from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from grpo_fast import LossConfig
from grpo_fast.attention import pack_groups
from grpo_fast.objective.advantages import whitened
from grpo_fast.objective.gae import gae, lam_by_length
from grpo_fast.objective.kl import EXACT, KL_ESTIMATORS
from grpo_fast.rollout import Rollout
from grpo_fast.rollout.vllm.teacher import TeacherServer
from grpo_fast.train.config import CriticConfig, DistillConfig
from grpo_fast.train.models.policy import Policy
from grpo_fast.train.models.reference import Reference
from grpo_fast.train.ranks.distributed import sum_, together
from grpo_fast.train.update.batch import StepBatch
from grpo_fast.train.update.critic import Critic
from grpo_fast.train.update.micro_batch import MicroBatch


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
    """Compute, with the current weights, the tensors that stay fixed over all updates on a batch:
    old and reference logps; with a critic values and advantages. A batch that has them is left.

    Args:
        keep_old: the policy's logps are wanted. A batch that is used for one update needs none:
            they are the new ones, and the ratio is exactly 1.
        reward_beta: weight of the KL to the reference that is taken off every token's reward.
        distill: by advantage it adds `coef`·(log q − log p) of every token, q the reference's.
        server: says log q in the reference's place, of the likeliest ids too for a loss.
    """
    if batch.has_fixed:
        return
    following, temperature = None, float(loss.temperature)
    by_advantage = distill is not None and distill.form == "advantage"
    by_loss = distill is not None and not by_advantage
    keep_old = keep_old or by_advantage or reward_beta is not None
    with together(in_step=policy.is_sharded):
        for micro in batch.micro_batches:
            if reference is not None and (by_loss or loss.kl_estimator in EXACT):
                micro.ref_hidden = reference.hidden(micro.packed)
            elif reference is not None:
                micro.ref_logps = reference.logps(micro.packed, temperature, micro.support)
            wanted = keep_old or (critic is not None and critic.is_shared)
            hidden = policy.hidden(micro.packed) if wanted else None
            if keep_old:
                micro.old_logps = policy.logps(micro.packed, temperature, hidden, micro.support)
            if server is not None:
                said = asked_of(server, batch.rollout, micro)
                if by_advantage:
                    micro.ref_logps = said[:, 0, 1]
                else:
                    micro.teacher = said
            if critic is not None:
                micro.old_values = critic.values(micro.packed, hidden)
        if critic is not None and critic.config.bootstrap:
            following = values_after_the_end(batch, critic)
    if critic is not None:
        following = None if following is None else sum_(following)
        rewards = token_rewards(batch, reward_beta, loss.kl_estimator)
        estimate_advantages(batch, rewards, following, critic.config)
    elif distill is not None and by_advantage:
        batch.set("token_advantages", teacher_advantages(batch, distill.coef))
    batch.has_fixed = True


def asked_of(server: TeacherServer, rollout: Rollout, micro: MicroBatch) -> Tensor:
    """(R, K + 1, 2): what the server says of the tokens of a micro-batch; see `scores`."""
    prompts, completions = rollout.prompt_ids, rollout.completion_ids
    samples = [([*prompts[i], *completions[i]], len(prompts[i])) for i in micro.chosen]
    return torch.cat(server.scores(samples)).to(micro.completion_mask.device)


def teacher_advantages(batch: StepBatch, coef: float) -> list[Tensor]:
    """coef·(log q − log p) of every token, and its completion's score (NaN: no verdict, 0)."""
    logps = zip(batch.of_each("ref_logps"), batch.of_each("old_logps"), strict=True)
    scores = batch.advantages.float().nan_to_num(nan=0.0)
    return [
        coef * (ref - old) + score.to(ref) for (ref, old), score in zip(logps, scores, strict=True)
    ]


def token_rewards(batch: StepBatch, beta: float | None, estimator: str) -> list[Tensor]:
    """−β·kl_t of each token and its own reward; a completion's reward is its last token's."""
    rewards = [torch.zeros_like(values) for values in batch.of_each("old_values")]
    if beta is not None:
        estimate = KL_ESTIMATORS[estimator]
        logps = zip(batch.of_each("ref_logps"), batch.of_each("old_logps"), strict=True)
        rewards = [-beta * estimate(ref - old)[0] for ref, old in logps]
    own = batch.token_rewards or [None] * len(rewards)
    for reward, score, each in zip(rewards, batch.advantages, own, strict=True):
        if each is None or score.isnan():  # a lost sample is NaN, once
            reward[-1] += score.to(reward)
        else:
            reward += each.to(reward)
    return rewards


def values_after_the_end(batch: StepBatch, critic: Critic) -> Tensor:
    """(N·G,) V of the state after the last token of a completion that was cut off; 0 where it ended
    with EOS, or belongs to another rank.

    That state is in no micro-batch: these completions are packed once more, with one token more.
    """
    following = torch.zeros(len(batch.rollout.completion_ids))
    for micro in batch.micro_batches:
        cut = [i for i in micro.chosen if batch.rollout.truncated[i] and not batch.mask_truncated]
        if micro.is_idle:
            cut = []
        if cut:
            following[cut] = _last_values(micro, batch, cut, critic).cpu()
        elif critic.trunk.is_sharded:  # in step with ranks that have one
            _last_values(micro, batch, micro.chosen[:1], critic)
    return following


def _last_values(micro: MicroBatch, batch: StepBatch, cut: list[int], critic: Critic) -> Tensor:
    prompts, completions = batch.rollout.prompt_ids, batch.rollout.completion_ids
    groups = []
    for _, members in groupby(cut, key=lambda i: i // batch.group_size):
        listed = list(members)
        # Which token comes last does not matter: nothing is asked about it but who predicts it.
        longer = [[*completions[i], completions[i][-1]] for i in listed]
        groups.append((prompts[listed[0]], longer))
    packed = pack_groups(groups, shared=batch.shared, device=micro.completion_mask.device)
    return critic.values(packed)[packed.cu_seqlens[1:].long() - 1]


def estimate_advantages(
    batch: StepBatch,
    rewards: list[Tensor],  # of the tokens of each completion
    following: Tensor | None,  # (N·G,)
    config: CriticConfig,
) -> None:
    """GAE of every token, and its return = advantage + value; then the advantages are whitened.

    Mean and deviation are those of the tokens that count, over the whole step; the others' are 0.
    """
    values, lengths = batch.of_each("old_values"), [len(x) for x in rewards]
    table, valued = (pad_sequence(x, batch_first=True).cpu() for x in (rewards, values))
    counts = pad_sequence(batch.of_each("completion_mask"), batch_first=True).cpu()
    alpha = config.lam_alpha
    lam = config.lam if alpha is None else lam_by_length(counts.sum(1), alpha)
    lam_returns = config.lam if config.lam_returns is None else config.lam_returns
    ends: Any = {"mask": counts, "following": following}
    advantages = gae(table, valued, config.gamma, lam, **ends)
    same = alpha is None and lam_returns == lam
    towards = advantages if same else gae(table, valued, config.gamma, lam_returns, **ends)
    returns = towards + torch.where(counts, valued, 0.0)
    if config.whiten and counts.any():
        advantages = torch.where(counts, whitened(advantages.double(), counts), 0.0).float()
    for name, padded in (("token_advantages", advantages), ("returns", returns)):
        rows = [row[:n].to(batch.device) for row, n in zip(padded, lengths, strict=True)]
        batch.set(name, rows)
