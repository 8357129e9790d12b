"""Log-probabilities of sampled tokens, recomputed by the trainer and by the model's forward."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.generation import logits_process as library

from grpo_fast import Support, logits_logps
from grpo_fast.rollout import Samples
from grpo_fast.rollout.samples import select_support
from grpo_fast.train.models.policy import Policy
from grpo_fast.train.update.batch import StepBatch

BUDGET = 8192  # tokens in a packed row
# Sampling settings in the order in which samplers apply them, each with transformers' class and
# the value that changes nothing.
SAMPLERS: dict[str, tuple[Any, float]] = {
    "repetition_penalty": (library.RepetitionPenaltyLogitsProcessor, 1.0),
    "temperature": (library.TemperatureLogitsWarper, 1.0),
    "min_p": (library.MinPLogitsWarper, 0.0),
    "top_k": (library.TopKLogitsWarper, 0),
    "top_p": (library.TopPLogitsWarper, 1.0),
}


@dataclass(frozen=True)
class Noise:
    """Difference between the trainer's packed rows and rows with a single completion."""

    dtype: str
    mean: float  # mean absolute difference in nats per token


@torch.no_grad()
def trainer_logps(
    policy: Policy, samples: Samples, temperature: float, budget: int = BUDGET
) -> Tensor:
    """Recompute the log-probabilities of all sampled tokens as training does.

    Args:
        policy: The trainer's policy.
        samples: The completions. If they have a support, log-probabilities are over the support.
        temperature: Temperature of the loss.
        budget: Most tokens in a packed row. With 1, each completion is alone in its row.

    Returns:
        Log-probabilities in fp32 on the CPU, shape (R,).
    """
    table = dataclasses.replace(samples, advantages=torch.zeros(len(samples)))
    batch = StepBatch(
        table, group_size=1, minibatches=1, budget=budget, device=policy.device,
        shared=policy.unshared is None,
    )  # fmt: skip
    for micro in batch.micro_batches:
        micro.write("old_logps", policy.logps(micro.packed, temperature, support=micro.support))
    assert batch.samples.old_logps is not None
    return batch.samples.old_logps.float().cpu()


def measure_noise(policy: Policy, samples: Samples, temperature: float) -> list[Noise]:
    """Measure the trainer's noise in the policy's dtype, in fp32 and in bf16."""
    unmasked = dataclasses.replace(samples, support=None)
    own = policy.autocast or policy.head.weight.dtype
    noises = []
    for dtype in dict.fromkeys((own, torch.float32, torch.bfloat16)):
        twin = policy if dtype == own else cast(policy, dtype)
        packed = trainer_logps(twin, unmasked, temperature)
        alone = trainer_logps(twin, unmasked, temperature, budget=1)
        name = str(dtype).removeprefix("torch.")
        noises.append(Noise(name, float((packed - alone).abs().mean())))
    return noises


def cast(policy: Policy, dtype: torch.dtype) -> Policy:
    """Return a copy of the policy in a different dtype."""
    twin = policy.frozen_copy()
    twin.autocast = None
    twin.lm.to(dtype)
    return twin


def forward_logps(
    policy: Policy,
    samples: Samples,
    settings: dict[str, float],
    prompts: Sequence[Sequence[int]] = (),
) -> Tensor:
    """Recompute log-probabilities with the model's own forward pass, one completion at a time.

    Args:
        policy: The policy whose model is called.
        samples: The completions. If they have a support, log-probabilities are over the support.
        settings: Sampling settings to apply to the logits, by the names in SAMPLERS.
        prompts: Prompt ids for each sample. Empty: the prompts of the samples.

    Returns:
        Log-probabilities in fp32 on the CPU, shape (R,); -inf for a token that cannot be drawn.
    """
    found = []
    with policy.generation():
        for i, prompt in enumerate(prompts or samples.prompt_ids):
            # 1. The logits that predict the completion.
            ids = torch.cat([torch.tensor(prompt), samples.completion(i)]).to(policy.device)
            output = policy.lm(input_ids=ids[None, :-1], use_cache=False)
            logits = output.logits[0, len(prompt) - 1 :].float()
            # 2. Penalties look at the ids before each token. The first id replaces later ones.
            places = torch.arange(len(ids), device=ids.device)
            context = torch.where(places < places[len(prompt) :, None], ids, ids[0])
            for name, (sampler, _) in SAMPLERS.items():
                if name in settings:
                    logits = sampler(settings[name])(context, logits)
            # 3. Only the tokens that the sampler kept, if the samples name them.
            support = select_support(samples.support, torch.arange(*samples.rows[i : i + 2]))
            if support is not None:
                support = Support(*(tensor.to(policy.device) for tensor in support))
            found.append(logits_logps(logits, ids[len(prompt) :], support=support).cpu())
    return torch.cat(found)
