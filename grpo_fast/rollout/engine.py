"""The contract of a rollout engine: token ids of prompts in, completions as sampled out."""

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

EngineName = Literal["transformers", "continuous", "vllm", "vllm-server"]
# name -> module:callable(policy, options) -> Engine; `options` has what `rollout:` is configured to
BUILDERS: dict[str, str] = {
    "transformers": "grpo_fast.rollout.own.engine:TransformersEngine",
    "continuous": "grpo_fast.rollout.own.continuous:ContinuousEngine",
    "vllm": "grpo_fast.rollout.vllm.local:build",
    "vllm-server": "grpo_fast.rollout.vllm.servers:build",
}

Seed = int | tuple[int | str, ...]


class Kept(NamedTuple):
    """The tokens that a truncating sampler chose from, row by row (CSR).

    The t-th token was drawn from `ids[offsets[t]:offsets[t + 1]]`; empty: the whole vocabulary.
    """

    ids: Tensor  # (nnz,) int32
    offsets: Tensor  # (n + 1,) int64
    mass: Tensor | None = None  # (n,) fp32: their probability before the others went; None: unknown


@functools.cache
def say_that_kept_is_unknown(engine: str) -> None:
    """Warn, once per process, that an engine does not report the tokens that truncation kept."""
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
    kept: Kept | None = None  # None: nothing truncated or asked for, or the engine cannot say


class Request(NamedTuple):
    """Ask for G = `group_size` completions of each prompt.

    Attributes:
        seed: a completion's random numbers depend on it, its prompt's place and its number.
        places: index of each prompt in the whole step's batch, rising; None: this is all of it.
            With them several processes sample what one would.
    """

    prompts: Sequence[Sequence[int]]  # token ids, none empty
    sampling: Sampling
    group_size: int
    seed: Seed
    places: Sequence[int] | None = None


class Engine(ABC):
    """Samples completions. A context manager that closes itself.

    No call waits for ever: what an engine waits for has a timeout, and its error says for what.
    """

    # The engine has a device and weights of its own: it may sample in a thread while the policy is
    # trained, and needs no sleep meanwhile.
    is_apart = False
    # Why the engine samples by a slower path, which gives other bits; None: it does not.
    fallback: str | None = None

    def generate(self, *fields: Any, **others: Any) -> list[Completion]:
        return self.sample(Request(*fields, **others))

    @abstractmethod
    def sample(self, request: Request) -> list[Completion]:
        """The completions of a request, those of a prompt side by side."""

    @abstractmethod
    def update(self, policy: Any, version: int) -> None:
        """Sample with the weights of this `Policy` from here on.

        version: tells weights apart; an engine that has this one already need not move any.
        """

    def sleep(self) -> None:  # noqa: B027
        """Leave the device to the trainer. Weights may be lost: `update` follows `wake`."""

    def wake(self) -> None:  # noqa: B027
        """Be ready for `update` and `sample`; nothing to do for one that is awake."""

    def close(self) -> None:  # noqa: B027
        """Give everything back; the engine is not used again."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def build_engine(policy: Any, options: Any = None) -> Engine:
    """The engine that `options.engine` names, ready to sample; None: our loop.

    Raises:
        ValueError: it cannot run here, or not with this model; the message says what is missing.
    """
    module, _, name = BUILDERS[options.engine if options else "transformers"].partition(":")
    return getattr(importlib.import_module(module), name)(policy, options)


@contextmanager
def awake(engine: Engine, policy: Any, version: int) -> Iterator[Engine]:
    """The engine awake and with this policy's weights; asleep afterwards."""
    engine.wake()
    engine.update(policy, version)
    try:
        yield engine
    finally:
        engine.sleep()


def seed_for(purpose: str, seed: Seed, *more: int) -> int:
    """A 63-bit seed for one purpose, such as "rollout", derived from an engine's seed."""
    return seed_of(purpose, *(seed if isinstance(seed, tuple) else (seed,)), *more)


def uniforms(
    seed: Seed, count: int, length: int, *, group_size: int, places: Sequence[int] | None
) -> Tensor:  # (count·G, length) in [0, 1)
    """The random numbers of `count` prompts' completions, in the order of their places."""
    generator = torch.Generator().manual_seed(seed_for("rollout", seed))
    wanted = set(range(count) if places is None else places)
    rows = []
    # One generator for the whole step's batch: the numbers of other ranks' places are drawn, too.
    for place in range(max(wanted, default=-1) + 1):
        group = torch.rand(group_size, length, generator=generator)
        if place in wanted:
            rows.append(group)
    return torch.cat(rows) if rows else torch.zeros(0, length)
