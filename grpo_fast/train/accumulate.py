"""One optimizer step's gradients, micro-batch by micro-batch."""

from __future__ import annotations

from typing import Any

from grpo_fast import LossConfig, linear_grpo_loss
from grpo_fast.attention import Head
from grpo_fast.train.batch import MicroBatch
from grpo_fast.train.exact_kl import exact_kl, is_exact, policy_term
from grpo_fast.train.metrics import LossMetrics, is_policy_alone, policy_gradient
from grpo_fast.train.policy import Policy


def accumulate(
    policy: Policy,
    minibatch: list[MicroBatch],
    config: LossConfig,
    *,
    correct_sampling: bool,
    validate: str,
    ref_head: Head | None = None,
) -> LossMetrics:
    """Gradients of one optimizer step: the normalisers are the whole step's, so the losses add up.

    Args:
        correct_sampling: hand the sampler's logps to the loss.
        validate: as in `linear_grpo_loss`.
        ref_head: the reference's, beside micro-batches that hold its hidden states.
    """
    items = max(1, sum(batch.active_tokens for batch in minibatch))
    completions = sum(len(batch) for batch in minibatch)
    # token_mean_local is local by definition: its micro-batches are averaged.
    share = 1 / len(minibatch) if config.aggregation == "token_mean_local" else 1.0
    seen = LossMetrics()
    for batch in minibatch:
        packed, head, mask = batch.packed, policy.head, batch.completion_mask
        per_token: dict[str, Any] = dict(
            completion_mask=mask, cu_seqlens=packed.cu_seqlens, old_logps=batch.old_logps,
            ref_logps=batch.ref_logps, num_items_in_batch=items,
            sampling_logps=batch.sampling_logps if correct_sampling else None,
            num_completions_in_batch=completions,
        )  # fmt: skip
        hidden, alone = policy.hidden(packed), policy_term(config)
        output = linear_grpo_loss(
            hidden, head.weight, packed.target_ids, batch.advantages,
            alone.replace(**head.rule), hidden_rows=packed.predicting, bias=head.bias,
            validate=validate, **per_token,
        )  # fmt: skip
        loss, metrics = output.loss, dict(output.metrics)
        if is_exact(config):
            assert ref_head is not None
            kl = exact_kl(
                hidden, head, ref_head, batch, config, num_items_in_batch=items,
                num_completions_in_batch=completions,
            )  # fmt: skip
            loss, metrics["kl"] = loss + config.beta * kl.weighted, kl.mean
        (loss * share).backward()
        metrics = {"loss": loss, **metrics}
        if not is_policy_alone(config):
            norm = policy_gradient(output, batch.advantages, alone, per_token)
            metrics["policy_logp_grad_norm"] = share * norm
        seen.add(metrics, batch.active_tokens, share)
        seen.logps.append((output.logps[mask], batch.sampling_logps[mask]))
    seen.optimizer_steps = 1
    return seen
