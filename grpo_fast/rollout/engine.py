"""The interface of a rollout engine, which samples completions for prompts of token ids."""

from __future__ import annotations

import functools
import importlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self

import torch
from torch import Tensor

from grpo_fast.kernels.support import Support
from grpo_fast.rollout.sampler import Sampling, seed_of

if TYPE_CHECKING:
    from grpo_fast.rollout.own.model import SampledModel

log = logging.getLogger(__name__)

# Values of `Completion.finish_reason`. Engines may define other values for completions that were
# cut off early.
EOS = "eos"
LENGTH = "length"

EngineName = Literal["transformers", "vllm", "vllm-server"]
# Engine name -> "module:function". The function takes (policy, options), where `options` is the
# section `rollout` of a configuration, and returns an Engine.
BUILDERS: dict[str, str] = {
    "transformers": "grpo_fast.rollout.own.engine:TransformersEngine",
    "vllm": "grpo_fast.rollout.vllm.local:build",
    "vllm-server": "grpo_fast.rollout.vllm.servers:VLLMServers",
}

Seed = int | tuple[int | str, ...]


@functools.cache
def warn_without_support(engine: str) -> None:
    """Warn once per process that an engine does not report which ids the truncation kept."""
    log.warning(
        "%s does not report the tokens that top_p and top_k kept: its log-probabilities are "
        "compared with the policy's over the whole vocabulary", engine,
    )  # fmt: skip


class Completion(NamedTuple):
    """One sampled completion of n tokens.

    Attributes:
        ids: n token ids. The last one is the first EOS, if the completion has one.
        logps: (n,) fp32 on the CPU, log-probabilities under the sampling distribution.
        finish_reason: `EOS`, `LENGTH`, or an engine-specific value for a completion that was cut
            off early.
        weight_version: version of the weights that sampled the first token.
        support: for each token, the ids that truncation (top_p, top_k, min_p) kept. None if nothing
            was truncated, or if the engine does not report the support.
        mass: (n,) fp32, probability of each token's support before truncation. None if unknown.
    """

    ids: list[int]
    logps: Tensor
    finish_reason: str
    weight_version: int
    support: Support | None = None
    mass: Tensor | None = None


class Request(NamedTuple):
    """Request for `group_size` completions of each prompt.

    Attributes:
        prompts: token ids of each prompt, at least one.
        sampling: the sampling options.
        group_size: number of completions of each prompt.
        seed: seed of the random numbers. The numbers of a completion depend on this seed, on the
            batch index of its prompt and on its index among the prompt's completions.
        places: index of each prompt in the batch of all ranks, in increasing order. With these
            indices, several ranks sample the same completions as one rank would. None if this
            request is the whole batch.
    """

    prompts: Sequence[Sequence[int]]
    sampling: Sampling
    group_size: int
    seed: Seed
    places: Sequence[int] | None = None


class Engine(ABC):
    """Base class of rollout engines. An engine is a context manager that closes itself on exit.

    Every blocking call of an engine has a timeout, and its error says what the engine waited for.

    Attributes:
        is_apart: True if the engine has its own device and its own copy of the weights. Such an
            engine may sample in a thread while the policy trains, and `sleep` does nothing.
        fallback: reason why the engine uses a slower implementation, whose results differ by
            rounding. None if the engine uses the fast implementation.
    """

    is_apart = False
    fallback: str | None = None

    def generate(self, *fields: Any, **others: Any) -> list[Completion]:
        """Call `sample` with a `Request` built from the arguments."""
        return self.sample(Request(*fields, **others))

    @abstractmethod
    def sample(self, request: Request) -> list[Completion]:
        """Return `group_size` completions for each prompt, in the order of the prompts.

        Raises:
            EngineError: the engine has stopped, or has no weights.
            NonFiniteLogits: the policy's logits are NaN or infinite.
        """

    @abstractmethod
    def update(self, policy: SampledModel, version: int) -> None:
        """Make the engine sample with the weights of this policy from now on.

        Args:
            policy: a `Policy` or `SampledModel`.
            version: version number of these weights. An engine that already has this version copies
                nothing.
        """

    def sleep(self) -> None:  # noqa: B027
        """Free the device for the trainer. Weights may be lost, and `update` restores them."""

    def close(self) -> None:  # noqa: B027
        """Release all resources. The engine cannot be used afterwards."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def build_engine(policy: SampledModel, options: Any = None) -> Engine:
    """Build the engine that `options.engine` names.

    Args:
        policy: a `Policy` or `SampledModel`.
        options: the section `rollout` of a configuration. None selects the engine `transformers`.

    Raises:
        ValueError: the engine cannot run here, or cannot run this model. The message says what is
            missing.
    """
    module, _, name = BUILDERS[options.engine if options else "transformers"].partition(":")
    return getattr(importlib.import_module(module), name)(policy, options)


@contextmanager
def awake(engine: Engine, policy: SampledModel, version: int) -> Iterator[Engine]:
    """Update the engine's weights on entry, and put it to sleep on exit."""
    engine.update(policy, version)
    try:
        yield engine
    finally:
        engine.sleep()


def seed_for(purpose: str, seed: Seed, *more: int) -> int:
    """Derive a 63-bit seed for one purpose, such as "rollout", from an engine's seed."""
    return seed_of(purpose, *(seed if isinstance(seed, tuple) else (seed,)), *more)


def uniforms(
    seed: Seed, count: int, length: int, *, group_size: int, places: Sequence[int] | None
) -> Tensor:
    """Return a uniform random number in [0, 1) for each token of the completions.

    Args:
        seed: see `Request`.
        count: number of prompts.
        length: number of tokens of a completion.
        group_size: number of completions of each prompt.
        places: index of each prompt in the batch of all ranks, or None if this rank has all
            prompts.

    Returns:
        The numbers, (count·group_size, length) fp32.
    """
    generator = torch.Generator().manual_seed(seed_for("rollout", seed))
    wanted = set(range(count) if places is None else places)
    rows = []
    # Draw the numbers of other ranks' prompts, too, and discard them. Otherwise a prompt's numbers
    # would depend on the number of ranks.
    for place in range(max(wanted, default=-1) + 1):
        group = torch.rand(group_size, length, generator=generator, dtype=torch.float32)
        if place in wanted:
            rows.append(group)
    return torch.cat(rows) if rows else torch.zeros(0, length)
