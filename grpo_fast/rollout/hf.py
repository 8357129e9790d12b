"""The engine that is always there: the trainer's own model, by transformers' `generate`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from grpo_fast.rollout.engine import EOS, LENGTH, Completion, Engine, Seed, uniforms
from grpo_fast.rollout.kept import KeptIds
from grpo_fast.rollout.sampler import NonFiniteLogits, Sampler, Sampling


class TransformersEngine(Engine):
    """Samples with the policy itself: left-padded batches, our sampler inside.

    The weights are the trainer's own, so `update` moves nothing and sleep frees nothing.
    """

    def __init__(self, policy: Any, options: Any = None) -> None:
        self.policy, self.version = policy, 0

    def update(self, policy: Any, version: int) -> None:
        self.policy, self.version = policy, version

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        *,
        group_size: int,
        seed: Seed,
        places: Sequence[int] | None = None,
    ) -> list[Completion]:
        numbers = uniforms(
            seed, len(prompts), sampling.max_new_tokens, group_size=group_size, places=places
        )
        repeated = [prompt for prompt in prompts for _ in range(group_size)]
        size = sampling.batch_size or max(len(repeated), 1)
        completions: list[Completion] = []
        with self.policy.generation():
            for start in range(0, len(repeated), size):
                end = start + size
                completions += self._batch(repeated[start:end], sampling, numbers[start:end])
        return completions

    def _batch(
        self, prompts: Sequence[Sequence[int]], options: Sampling, numbers: Tensor
    ) -> list[Completion]:
        """A completion for each prompt and row of random numbers."""
        policy, device, pad = self.policy, self.policy.device, self.policy.pad_id
        longest = max(map(len, prompts))
        ids = torch.tensor([[pad] * (longest - len(p)) + [*p] for p in prompts], device=device)
        mask = torch.tensor(
            [[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=device
        )
        kept = KeptIds()
        sampler = Sampler(numbers.to(device), options, kept.add if options.wants_kept else None)
        output = policy.lm.generate(
            input_ids=ids, attention_mask=mask, max_new_tokens=options.max_new_tokens,
            do_sample=False, logits_processor=[sampler], eos_token_id=sorted(policy.eos_ids),
            pad_token_id=pad,
        )  # fmt: skip
        completions = []
        rows, logps = output[:, longest:].tolist(), sampler.logps.cpu()
        for row, row_logps in zip(rows, logps, strict=True):
            end = next((t + 1 for t, token in enumerate(row) if token in policy.eos_ids), None)
            if row_logps[:end].isnan().any():
                raise NonFiniteLogits("the policy's logits are NaN or infinite")
            why, own = LENGTH if end is None else EOS, row_logps[: len(row[:end])].clone()
            completions.append(Completion(row[:end], own, why, self.version))
        sets = kept.by_completion([len(one.ids) for one in completions])
        return [one._replace(kept=own) for one, own in zip(completions, sets, strict=True)]
