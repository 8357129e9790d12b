"""Whether packed rows and the fused head compute what the model itself computes."""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_fast.attention import check_tolerance, pack_groups, small_windows
from grpo_fast.train.models.policy import Policy


@torch.no_grad()
def self_check(policy: Policy) -> float:
    """Compare packed logps with the model's own logits on a prompt with two completions: finds a
    head with an unknown rule, attention that ignores the layout, experts drawn at random in
    training.

    Returns the largest difference in nats; raises ValueError beyond the dtype's tolerance.
    """
    if policy.positions < 9:  # 4 tokens of prompt, 5 of a completion
        raise ValueError(f"max_position_embeddings: expected at least 9, got {policy.positions}")
    rows = policy.head.weight.shape[0]
    prompt, *completions = (
        [(7 * i + 11 * j + 3) % rows for i in range(n)] for j, n in enumerate((4, 5, 3))
    )
    groups, is_shared = [(prompt, completions)], policy.unshared is None
    kind, dtype = policy.lm.config.model_type, policy.autocast or policy.head.weight.dtype
    training = policy.lm.training
    with small_windows(policy.lm):
        policy.lm.train()  # experts that are drawn at random in training would show
        try:
            ours = policy.logps(pack_groups(groups, shared=is_shared, device=policy.device))
        except (AttributeError, TypeError) as error:  # the model computes with its mask
            raise ValueError(f"model_type {kind}: packed attention fails: {error}") from error
        finally:
            policy.lm.train(training)
        with policy.generation():
            own = [_own_logps(policy, prompt + c)[len(prompt) - 1 :] for c in completions]
    theirs = torch.cat(own)
    if theirs.isnan().any():
        raise ValueError(f"model_type {kind}: expected weights with finite logits, got NaN")
    difference = float((ours - theirs).abs().max())
    if not difference <= check_tolerance(dtype):
        raise ValueError(
            f"model_type {kind}: packed attention with the fused head "
            f"differs from its own logits by {difference:.3g} nats (expected ≤ "
            f"{check_tolerance(dtype)} in {dtype}); its head, attention or training mode "
            "has a rule this trainer does not know"
        )
    return difference


def _own_logps(policy: Policy, sequence: list[int]) -> Tensor:
    ids = torch.tensor([sequence], device=policy.device)
    logits = policy.lm(input_ids=ids, use_cache=False).logits[0, :-1].float()
    return logits.log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
