"""The passes of an update: columns that all updates of a step use, and the gradients of the loss.

The gradients of an optimizer step are accumulated over its micro-batches.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from grpo_fast import DivergenceTerm, LossConfig, LossOutput, TeacherHead, linear_grpo_loss
from grpo_fast.attention import Head
from grpo_fast.objective.kl import EXACT, KL_ESTIMATORS
from grpo_fast.train import ranks
from grpo_fast.train.batch import FIXED, MicroBatch, StepBatch, Totals
from grpo_fast.train.critic import Critic
from grpo_fast.train.metrics import LossMetrics
from grpo_fast.train.models.policy import Policy, Reference


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
    keep_old = keep_old or reward_beta is not None
    temperature = float(loss.temperature)
    for micro in batch.micro_batches:
        # 1. Evaluate the reference model. An exact divergence needs the hidden states of the
        # reference. All other estimators need its log-probs.
        if reference is not None and loss.kl_estimator in EXACT:
            micro.write("ref_hidden", reference.hidden(micro.packed))
        elif reference is not None:
            micro.write("ref_logps", reference.logps(micro.packed, temperature, micro.support))
        # 2. Evaluate the policy. A shared critic uses the same hidden states.
        hidden = None
        if keep_old or (critic is not None and critic.is_shared):
            hidden = policy.hidden(micro.packed)
        if keep_old:
            micro.write("old_logps", policy.logps(micro.packed, temperature, hidden, micro.support))
        # 3. Evaluate the critic.
        if critic is not None:
            micro.write("values", critic.values(micro.packed, hidden))
    # 4. Compute advantages and returns from the values.
    if critic is not None:
        batch.exchange(FIXED)
        critic.estimate_advantages(batch, reward_beta, loss.kl_estimator)
    batch.has_fixed = True


def accumulate(
    policy: Policy,
    minibatch: list[MicroBatch],
    config: LossConfig,
    *,
    correct_sampling: bool,
    validate: str,
    critic: Critic | None = None,
    ref_head: Head | None = None,
    totals: Totals | None = None,
) -> LossMetrics:
    """Accumulate the gradients of one optimizer step in the parameters.

    Args:
        policy: the policy.
        minibatch: this rank's micro-batches of the optimizer step.
        config: configuration of the loss.
        correct_sampling: pass the sampler's log-probs to the loss.
        validate: argument `validate` of `linear_grpo_loss`.
        critic: value function whose loss is added, or None.
        ref_head: LM head of the reference. Only an exact KL needs it.
        totals: counts over all ranks that normalize the losses. None counts `minibatch`.

    Returns:
        The metrics of the optimizer step on this rank.
    """
    if totals is None:
        items = max(1, sum(batch.active_tokens for batch in minibatch))
        totals = Totals(items, sum(map(len, minibatch)), 0)
    alone = policy_term(config)
    seen = LossMetrics()
    for batch in minibatch:
        mask = batch.completion_mask
        sampling_logps = batch.column("logps")
        assert sampling_logps is not None
        term = exact_kl(batch, ref_head, config)
        # 1. Compute hidden states and the fused loss inside the model's forward pass, where FSDP2
        # has gathered the weights of the head.
        loss, hidden, output = policy.inside(partial(
            packed_loss, policy, batch, alone, num_items_in_batch=totals.items,
            num_completions_in_batch=totals.completions, divergence=term, validate=validate,
            sampling_logps=sampling_logps if correct_sampling else None,
        ))  # fmt: skip
        metrics = {"loss": loss, **output.metrics}
        if term is not None:
            metrics["kl"] = metrics.pop("divergence")
        # 2. Run the backward pass. With a critic, the backward pass includes the value loss.
        if critic is None:
            loss.backward()
        else:
            metrics |= critic.backward(loss, batch, hidden, totals.items)
        # 3. Record metrics. Skip idle micro-batches, which exist only because FSDP2 requires the
        # same number of passes on all ranks.
        if batch.is_idle:
            continue
        ref_logps = batch.column("ref_logps")
        if ref_logps is not None and not config.uses_reference:
            differences = ref_logps - output.logps
            kl, _ = KL_ESTIMATORS[config.kl_estimator](differences, *config.kl_limits)
            metrics["kl"] = kl[mask].sum() / mask.sum().clamp(min=1)
        seen.add(metrics, batch.active_tokens)
        seen.logps.append((output.logps[mask], sampling_logps[mask]))
    return seen


def packed_loss(
    policy: Policy, batch: MicroBatch, config: LossConfig, **options: Any
) -> tuple[Tensor, Tensor, LossOutput]:
    """Compute the fused loss of a micro-batch with T tokens.

    Args:
        policy: the policy.
        batch: the micro-batch.
        config: configuration of the loss.
        **options: arguments of `linear_grpo_loss` that do not come from the policy or the
            micro-batch.

    Returns:
        The loss, the hidden states of shape (T, H), and the LossOutput.
    """
    hidden = policy.hidden(batch.packed)
    head = policy.head
    by_token = batch.column("token_advantages")
    output = linear_grpo_loss(
        hidden, head.weight, batch.packed.target_ids,
        batch.advantages if by_token is None else by_token, config.replace(**head.logit_kwargs),
        completion_mask=batch.completion_mask, cu_seqlens=batch.packed.cu_seqlens,
        old_logps=batch.column("old_logps"), ref_logps=batch.column("ref_logps"),
        support=batch.support, hidden_rows=batch.packed.predicting, bias=head.bias, **options,
    )  # fmt: skip
    return output.loss, hidden, output


def policy_term(config: LossConfig) -> LossConfig:
    """Return the loss configuration without an exact KL, which a DivergenceTerm adds."""
    if config.kl_estimator not in EXACT:
        return config
    return config.replace(beta=0.0, kl_estimator=LossConfig.kl_estimator)


def exact_kl(batch: MicroBatch, ref_head: Head | None, config: LossConfig) -> DivergenceTerm | None:
    """Return the loss term of an exact KL to the reference, or None if the loss has none."""
    ref_hidden = batch.column("ref_hidden")
    if ref_hidden is None or ref_head is None:
        return None
    weight, bias = (None if x is None else ranks.full_tensor(x.detach()) for x in ref_head[:2])
    temperature = float(config.temperature)
    teacher = TeacherHead(ref_hidden, weight, bias, temperature, **ref_head.logit_kwargs)
    return DivergenceTerm(teacher, EXACT[config.kl_estimator], config.beta)
