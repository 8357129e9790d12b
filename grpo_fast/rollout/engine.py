"""The interface of a rollout engine: token ids of prompts in, sampled completions out."""

from __future__ import annotations

import functools
import importlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple, Self

import torch
from torch import Tensor

from grpo_fast.rollout.sampler import Sampling, seed_of

log = logging.getLogger(__name__)

EOS, LENGTH = "eos", "length"  # how a completion ends; engines may have further words

EngineName = Literal["transformers", "vllm", "vllm-server"]
# name -> module:callable(policy, options) -> Engine; `options` has what `rollout:` is configured to
BUILDERS: dict[str, str] = {
    "transformers": "grpo_fast.rollout.own.engine:TransformersEngine",
    "vllm": "grpo_fast.rollout.vllm.local:build",
    "vllm-server": "grpo_fast.rollout.vllm.servers:build",
}

Seed = int | tuple[int | str, ...]


class Kept(NamedTuple):
    """The tokens that a truncating sampler chose from, token by token (CSR).

    Token t was drawn from `ids[offsets[t]:offsets[t + 1]]`; empty: from the whole vocabulary.
    """

    ids: Tensor  # (nnz,) int32
    offsets: Tensor  # (n + 1,) int64
    mass: Tensor | None = None  # (n,) fp32: their probability before truncation; None: unknown


@functools.cache
def say_that_kept_is_unknown(engine: str) -> None:
    """Warn once per process that an engine does not report the tokens that truncation kept."""
    log.warning(
        "%s does not say which tokens top_p and top_k kept: its log-probabilities are compared "
        "with the policy's over the whole vocabulary", engine,
    )  # fmt: skip


class Completion(NamedTuple):
    """One completion of n tokens."""

    ids: list[int]  # up to and with the first EOS
    logps: Tensor  # (n,) fp32 on the CPU, of the distribution that was sampled from
    finish_reason: str  # EOS, LENGTH, or an engine's own word for a completion that was cut off
    weight_version: int  # of the weights that its first token was sampled with
    kept: Kept | None = None  # None: not truncated, not requested, or not reported by the engine


class Request(NamedTuple):
    """A request for G = `group_size` completions of each prompt.

    Attributes:
        seed: the random numbers of a completion depend on the seed, the place of its prompt and
            its number among the prompt's completions.
        places: index of each prompt in the batch of the whole step, rising; None: this request is
            the whole batch. With places several processes sample what one process would sample.
    """

    prompts: Sequence[Sequence[int]]  # token ids, none empty
    sampling: Sampling
    group_size: int
    seed: Seed
    places: Sequence[int] | None = None


class Engine(ABC):
    """Samples completions. As a context manager it closes itself.

    Every wait of an engine has a timeout, whose error names what the engine waited for.
    """

    # The engine has another device and its own weights. It may sample in a thread while the policy
    # is trained, and does not sleep meanwhile.
    is_apart = False
    # Why the engine samples by a slower path, which gives different bits; None: it does not.
    fallback: str | None = None

    def generate(self, *fields: Any, **others: Any) -> list[Completion]:
        return self.sample(Request(*fields, **others))

    @abstractmethod
    def sample(self, request: Request) -> list[Completion]:
        """Return the completions of a request, those of a prompt next to each other."""

    @abstractmethod
    def update(self, policy: Any, version: int) -> None:
        """Sample with the weights of this `Policy` from now on.

        Args:
            version: of the weights. An engine that already has this version moves none.
        """

    def sleep(self) -> None:  # noqa: B027
        """Free the device for the trainer. Weights may be lost: call `update` after `wake`."""

    def wake(self) -> None:  # noqa: B027
        """Prepare for `update` and `sample`. An engine that is awake does nothing."""

    def close(self) -> None:  # noqa: B027
        """Release all resources. The engine cannot be used afterwards."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def build_engine(policy: Any, options: Any = None) -> Engine:
    """Return the engine that `options.engine` names, ready to sample; None: our own loop.

    Raises:
        ValueError: it cannot run here, or not with this model; the message says what is missing.
    """
    module, _, name = BUILDERS[options.engine if options else "transformers"].partition(":")
    return getattr(importlib.import_module(module), name)(policy, options)


@contextmanager
def awake(engine: Engine, policy: Any, version: int) -> Iterator[Engine]:
    """Wake the engine and give it this policy's weights; let it sleep afterwards."""
    engine.wake()
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
) -> Tensor:  # (count·G, length) in [0, 1)
    """Return the random numbers of the completions of `count` prompts, in the order of places."""
    generator = torch.Generator().manual_seed(seed_for("rollout", seed))
    wanted = set(range(count) if places is None else places)
    rows = []
    # One generator for the batch of the whole step: draw the numbers of other ranks' places, too.
    for place in range(max(wanted, default=-1) + 1):
        group = torch.rand(group_size, length, generator=generator)
        if place in wanted:
            rows.append(group)
    return torch.cat(rows) if rows else torch.zeros(0, length)
