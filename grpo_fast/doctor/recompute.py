"""Log-probabilities of sampled tokens, by the trainer and by the model's own forward pass."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_fast import Support
from grpo_fast.rollout import Samples
from grpo_fast.rollout.ranges import select_support
from grpo_fast.train.models.policy import Policy
from grpo_fast.train.update.batch import StepBatch

BUDGET = 8192  # trunk tokens of a packed row
LOWEST, HIGHEST = 0.9, 1.1  # bounds of a ratio, about as wide as PPO's clip


@dataclass(frozen=True)
class Noise:
    """The trainer against itself: the same tokens, each completion in a row alone."""

    dtype: str
    mean: float  # of the absolute difference, nats per token
    share: float  # of the tokens whose ratio is below LOWEST or above HIGHEST


@dataclass(frozen=True)
class Row:
    """A completion of n tokens with the logits of the model's own forward pass."""

    logits: Tensor  # (n, V) fp32
    targets: Tensor  # (n,) int64
    context: Tensor  # (n, L) int64: the ids before each token; the first id replaces later ones
    support: Support | None  # what each token was drawn from; None: not known


@torch.no_grad()
def trainer_logps(
    policy: Policy, samples: Samples, temperature: float, budget: int = BUDGET
) -> Tensor:
    """Return (R,) logps by the trainer's packed rows; over the support if the samples have one."""
    table = dataclasses.replace(samples, advantages=torch.zeros(len(samples)))
    batch = StepBatch(
        table, group_size=1, minibatches=1, budget=budget, device=policy.device,
        shared=policy.unshared is None,
    )  # fmt: skip
    for micro in batch.micro_batches:
        micro.write("old_logps", policy.logps(micro.packed, temperature, support=micro.support))
    assert batch.samples.old_logps is not None
    return batch.samples.old_logps.float().cpu()


def own_noise(policy: Policy, samples: Samples, temperature: float) -> list[Noise]:
    """Return the trainer's noise in the policy's dtype, then in the others of fp32 and bf16."""
    plain = dataclasses.replace(samples, support=None)
    own = policy.autocast or policy.head.weight.dtype
    noises = []
    for dtype in dict.fromkeys((own, torch.float32, torch.bfloat16)):
        twin = policy if dtype == own else cast(policy, dtype)
        gap = trainer_logps(twin, plain, temperature) - trainer_logps(twin, plain, temperature, 1)
        share = ((gap.exp() < LOWEST) | (gap.exp() > HIGHEST)).float().mean()
        name = str(dtype).removeprefix("torch.")
        noises.append(Noise(name, float(gap.abs().mean()), float(share)))
    return noises


def cast(policy: Policy, dtype: torch.dtype) -> Policy:
    """Return a copy of the policy in a different dtype."""
    twin = policy.frozen_copy()
    twin.autocast = None
    twin.lm.to(dtype)
    return twin


def own_logps(
    policy: Policy,
    samples: Samples,
    logps: Callable[[Row], Tensor],
    prompts: Sequence[Sequence[int]] = (),
) -> Tensor:
    """Return (R,) fp32 logps by the model's own forward pass, one completion at a time.

    Args:
        logps: computes (n,) logps of a row.
        prompts: token ids of each sample's prompt; empty: the samples' prompts.
    """
    found = []
    with policy.generation():
        for i, prompt in enumerate(prompts or samples.prompt_ids):
            ids = torch.cat([torch.tensor(prompt), samples.completion(i)]).to(policy.device)
            output = policy.lm(input_ids=ids[None, :-1], use_cache=False)
            places = torch.arange(len(ids), device=ids.device)
            is_before = places < places[len(prompt) :, None]
            support = select_support(samples.support, torch.arange(*samples.rows[i : i + 2]))
            row = Row(
                logits=output.logits[0, len(prompt) - 1 :].float(),
                targets=ids[len(prompt) :],
                context=torch.where(is_before, ids, ids[0]),
                support=support and Support(*(tensor.to(policy.device) for tensor in support)),
            )
            found.append(logps(row).cpu())
    return torch.cat(found)
