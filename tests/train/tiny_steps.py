"""Helpers for tests of a single training step.

They build batches of random token ids and compute logits without packing.
"""

import dataclasses
from collections.abc import Collection, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from grpo_fast import LossConfig, Support
from grpo_fast.rollout import Completion, Samples
from grpo_fast.rollout import samples as rollouts
from grpo_fast.rollout.engine import EOS, LENGTH
from grpo_fast.train import update as train_gradients
from grpo_fast.train.batch import MicroBatch, StepBatch
from grpo_fast.train.critic import Critic

accumulate = partial(train_gradients.accumulate, correct_sampling=False, validate="full")


def gradients(
    policy: Any,
    micro_batches: list[MicroBatch],
    config: LossConfig,
    critic: Critic | None = None,
    **options: Any,
) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Clear the gradients and call `accumulate`. Return the metrics, and the gradients by name.

    The names of a separate critic begin with "own.", and those of a value head with "value.".
    """
    named = dict(policy.model.named_parameters())
    if critic is not None:
        named |= critic.head.named_parameters(prefix="value")
        if not critic.is_shared:
            named |= critic.trunk.model.named_parameters(prefix="own")
    for parameter in named.values():
        parameter.grad = None
    seen = accumulate(policy, micro_batches, config, critic=critic, **options)
    return seen.result(), {n: p.grad.clone() for n, p in named.items() if p.grad is not None}


def rollout_of(
    shapes: Sequence[tuple[int, Sequence[int]]],  # tokens of a prompt and of its completions
    *,
    cut: Collection[int] = (),  # completions without an EOS
    vocabulary: int = 13,
) -> Samples:
    """Return samples with random token ids.

    The log-prob of each token is the index of its completion, so that tests can check which
    completion a value belongs to.
    """
    generator = torch.Generator().manual_seed(3)

    def ids(n: int) -> list[int]:
        return torch.randint(2, vocabulary, (n,), generator=generator).tolist()

    prompts = [ids(n) for n, _ in shapes]
    completions = [ids(n) for _, lengths in shapes for n in lengths]
    logps = [torch.full((len(c),), float(i)) for i, c in enumerate(completions)]
    return table_of(prompts, completions, cut=cut, logps=logps)


def table_of(
    prompts: Sequence[list[int]],
    completions: Sequence[list[int]],  # the same number for each prompt
    *,
    cut: Collection[int] = (),  # completions without an EOS
    logps: Sequence[Tensor] | None = None,  # None uses zeros
    texts: Sequence[str] = (),
    supports: Sequence[Support | None] | None = None,
) -> Samples:
    drawn = []
    for i, ids in enumerate(completions):
        own = torch.zeros(len(ids)) if logps is None else logps[i]
        support = None if supports is None else supports[i]
        drawn.append(Completion(ids, own, LENGTH if i in cut else EOS, 0, support))
    return rollouts.table_of(prompts, drawn, texts)


def batch_of(samples: Samples, advantages: Tensor, **options: Any) -> StepBatch:
    """Return a `StepBatch` of the samples.

    By default it has groups of three completions, one minibatch and one micro-batch. `options`
    override the defaults.
    """
    settings = dict(budget=10**6, device="cpu") | options
    return StepBatch(dataclasses.replace(samples, advantages=advantages), **settings)


def logits_of(
    policy: Any, prompt: list[int], completion: list[int], *, with_graph: bool = False
) -> Tensor:
    """Return the logits (tokens, V) that predict the tokens of a completion.

    The model computes the logits of this completion alone, with its default attention and without
    packing.
    """
    with policy.generation(), torch.set_grad_enabled(with_graph):
        found = policy.lm(torch.tensor([prompt + completion]), use_cache=False).logits[0]
    return found[len(prompt) - 1 : -1]


def taken(logits: Tensor, completion: list[int]) -> Tensor:
    """Return the log-probability of each token of the completion, shape (tokens,)."""
    return logits.log_softmax(-1).gather(-1, torch.tensor(completion)[:, None])[:, 0]
