"""Log-probabilities of sampled tokens, recomputed with the trainer's code."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from grpo_fast.rollout import Samples
from grpo_fast.train.models.policy import Policy
from grpo_fast.train.update.batch import StepBatch

BUDGET = 8192  # largest number of tokens in a packed row


@torch.no_grad()
def trainer_logps(policy: Policy, samples: Samples, temperature: float) -> Tensor:
    """Recompute the log-probabilities of all sampled tokens with the code that training uses.

    Args:
        policy: The trainer's policy.
        samples: The completions. If they record a support (the tokens that the sampler kept), the
            log-probabilities are computed over the support.
        temperature: Temperature of the loss.

    Returns:
        Log-probabilities in fp32 on the CPU, shape (R,).
    """
    table = dataclasses.replace(samples, advantages=torch.zeros(len(samples)))
    batch = StepBatch(
        table, group_size=1, budget=BUDGET, device=policy.device, shared=policy.unshared is None
    )
    for micro in batch.micro_batches:
        micro.write("old_logps", policy.logps(micro.packed, temperature, support=micro.support))
    assert batch.samples.old_logps is not None
    return batch.samples.old_logps.float().cpu()


def cast(policy: Policy, dtype: torch.dtype) -> Policy:
    """Return a copy of the policy that computes in `dtype` without autocast."""
    twin = policy.frozen_copy()
    twin.autocast = None
    twin.lm.to(dtype)
    return twin
