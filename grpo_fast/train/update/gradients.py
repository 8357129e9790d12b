"""One optimizer step's gradients, micro-batch by micro-batch, and how noisy they are."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from grpo_fast import (
    DivergenceTerm,
    LossConfig,
    LossOutput,
    TeacherHead,
    TeacherTopK,
    linear_grpo_loss,
)
from grpo_fast.attention import Head, PackedTree
from grpo_fast.objective.kl import EXACT, KL_ESTIMATORS
from grpo_fast.train.config import DistillConfig
from grpo_fast.train.metrics.losses import LossMetrics, is_policy_alone, policy_gradient
from grpo_fast.train.models.policy import Policy
from grpo_fast.train.ranks.distributed import rank, size, sum_, together, whole
from grpo_fast.train.update.batch import StepBatch, Totals
from grpo_fast.train.update.critic import Critic, token_weights
from grpo_fast.train.update.micro_batch import MicroBatch


def accumulate(
    policy: Policy,
    minibatch: list[MicroBatch],
    config: LossConfig,
    *,
    correct_sampling: bool,
    validate: str,
    critic: Critic | None = None,
    ref_head: Head | None = None,
    distill: DistillConfig | None = None,
    totals: Totals | None = None,
) -> LossMetrics:
    """Gradients of one optimizer step: the normalisers are the whole step's, so the losses add up.

    Args:
        correct_sampling: hand the sampler's logps to the loss.
        validate: as in `linear_grpo_loss`.
        critic: its value loss is added, under the same normalisers.
        ref_head: the reference's, beside micro-batches that hold its hidden states.
        distill: how far the reference, as a teacher, is followed; None: by the config's exact KL.
        totals: of the step on all ranks; None: these micro-batches are all of it.
    """
    items, completions, count, _ = totals or Totals.of(minibatch)
    # token_mean_local is local by definition: its micro-batches are averaged.
    share = 1 / count if config.aggregation == "token_mean_local" else 1.0
    alone = policy_term(config)
    is_alone = is_policy_alone(config, critic is not None and critic.is_shared)
    seen = LossMetrics()
    for batch in minibatch:
        packed, mask = batch.packed, batch.completion_mask
        by_prompt = config.aggregation == "prompt_mean"
        total: Any = batch.prompt_items if by_prompt else items * share
        advantages = batch.advantages if batch.token_advantages is None else batch.token_advantages
        per_token: dict[str, Any] = dict(
            completion_mask=mask, cu_seqlens=packed.cu_seqlens, old_logps=batch.old_logps,
            ref_logps=batch.ref_logps, num_items_in_batch=total,
            sampling_logps=batch.sampling_logps if correct_sampling else None,
            num_completions_in_batch=completions,
        )  # fmt: skip
        term = divergence_term(batch, ref_head, config, distill)
        keywords = {**per_token, "support": batch.support, "divergence": term}
        loss, hidden, output = policy.inside(
            partial(policy_loss, policy, packed, advantages, alone, validate, keywords)
        )
        metrics = dict(output.metrics)
        if term is not None and distill is None:
            metrics["kl"] = metrics.pop("divergence")
        metrics = {"loss": loss, **metrics}
        if critic is None:
            (loss * share).backward()
        else:
            weights = token_weights(batch, config, total if by_prompt else items, completions)
            metrics |= critic.backward(loss, batch, hidden, weights, share)
        # Only here: FSDP2's ranks gather in every forward and backward pass, so all make as many.
        if batch.is_idle:
            continue
        if not is_alone or (distill is not None and term is not None):
            norm = policy_gradient(output, advantages, alone, per_token)
            metrics["policy_logp_grad_norm"] = share * norm
        if batch.ref_logps is not None and not config.uses_reference:
            metrics["kl"] = mean_kl(output.logps, batch, config)
        seen.add(metrics, batch.active_tokens, share)
        seen.logps.append((output.logps[mask], batch.sampling_logps[mask]))
    return seen


def policy_loss(
    policy: Policy,
    packed: PackedTree,
    advantages: Tensor,
    config: LossConfig,
    validate: str,
    per_token: dict[str, Any],
) -> tuple[Tensor, Tensor, LossOutput]:
    """The loss, with its graph, the (T, H) hidden states it comes from, and its LossOutput."""
    hidden, head = policy.hidden(packed), policy.head
    output = linear_grpo_loss(
        hidden, head.weight, packed.target_ids, advantages, config.replace(**head.rule),
        hidden_rows=packed.predicting, bias=head.bias, validate=validate, **per_token,
    )  # fmt: skip
    return output.loss, hidden, output


def policy_term(config: LossConfig) -> LossConfig:
    """The loss without an exact KL, which is a divergence beside it."""
    if config.kl_estimator not in EXACT:
        return config
    return config.replace(beta=0.0, kl_estimator=LossConfig.kl_estimator)


def divergence_term(
    batch: MicroBatch, ref_head: Head | None, config: LossConfig, distill: DistillConfig | None
) -> DivergenceTerm | None:
    """The divergence from a teacher that was asked, or from the reference (an exact KL, or a
    teacher's); None without `teacher` and `ref_hidden`.
    """
    teacher: TeacherHead | TeacherTopK
    if batch.teacher is not None:
        ids, logps = batch.teacher.unbind(-1)
        teacher = TeacherTopK(ids.long(), logps.float())
    elif batch.ref_hidden is None or ref_head is None:
        return None
    else:
        weight, bias = (None if x is None else whole(x.detach()) for x in ref_head[:2])
        rule = float(config.temperature), ref_head.softcap, ref_head.logit_scale
        teacher = TeacherHead(batch.ref_hidden, weight, bias, *rule)
    if distill is None:
        return DivergenceTerm(teacher, EXACT[config.kl_estimator], config.beta)
    return DivergenceTerm(teacher, distill.kind, distill.coef, distill.beta)


def mean_kl(logps: Tensor, batch: MicroBatch, config: LossConfig) -> Tensor:
    """0-d: the KL to a reference that the loss does not read, over the tokens that count."""
    assert batch.ref_logps is not None
    kl, _ = KL_ESTIMATORS[config.kl_estimator](batch.ref_logps - logps, *config.kl_limits)
    return kl[batch.completion_mask].sum() / max(batch.active_tokens, 1)


def gradient_variance(policy: Policy, batch: StepBatch, config: LossConfig) -> dict[str, float]:
    """How noisy the gradient of the policy term is, at the policy that drew the rollout.

    Each group is an independent estimate g_i of the same gradient (its loss is normalised as that
    of a step of this group alone). For n groups, with ḡ their mean,

        grad_variance = Σ|g_i − ḡ|² / (n·(n − 1))      the trace of the covariance of ḡ
        grad_signal   = |ḡ|² − grad_variance           an unbiased |E g|²; it may be negative

    {} for a single group. It costs a forward and a backward pass over the batch, and two copies of
    the gradients; the parameters' own must be empty, and are left so.
    """
    group_size = batch.group_size
    count = len(batch.advantages) // group_size
    if count < 2:
        return {}
    alone = config.replace(beta=0.0 if config.uses_reference else config.beta, entropy_coef=0.0)
    parameters = policy.trainable()
    total = [torch.zeros_like(p, dtype=torch.float32) for p in parameters]
    squares = 0.0
    with together():
        for group in range(rank(), count, size()):
            first = group * group_size
            members = list(range(first, first + group_size))
            accumulate(
                policy, [batch.packed([members])], alone, correct_sampling=False, validate="auto"
            )
            for own, p in zip(total, parameters, strict=True):
                if p.grad is not None:
                    squares += float(p.grad.double().square().sum())
                    own += p.grad.float()
                    p.grad = None
    squares = float(sum_(torch.tensor(squares, dtype=torch.float64)))
    mean_square = sum(float(sum_(s).double().square().sum()) for s in total) / count**2
    variance = max(0.0, squares - count * mean_square) / (count * (count - 1))
    return {"grad_variance": variance, "grad_signal": mean_square - variance}
