"""Interface of the rollout engines, their options, and the sampler of the engine `transformers`.

`Engine` is the base class. An engine samples completions for prompts of token ids. `Sampling` has
the sampling options, and `VLLMOptions` has the options of the vLLM engines.

`sample` draws tokens for the engine `transformers`. It uses one uniform random number per token. It
selects the first token, in vocabulary order, whose cumulative probability exceeds the number. The
number depends only on the seed, the index of the completion and the position of the token, so
samples are reproducible. The vLLM engines use vLLM's sampler.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import logging
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self

import torch
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from torch import Tensor

from grpo_fast.errors import require
from grpo_fast.kernels.types import Support

if TYPE_CHECKING:
    from grpo_fast.rollout.own.model import SampledModel

log = logging.getLogger(__name__)
MIN_TEMPERATURE = 1e-6


class Sampling(BaseModel):
    """Sampling options, such as the temperature and the length of completions.

    Attributes:
        max_new_tokens: Largest number of tokens of a completion.
        temperature: Sampling temperature; 0 always selects the likeliest token.
        top_p: Keep the likeliest tokens whose probabilities sum to this; 1 keeps all tokens.
        top_k: Keep this many of the likeliest tokens; 0 keeps all tokens.
        min_p: Drop tokens below this fraction of the largest probability; 0 keeps all tokens.
        batch_size: Number of completions that are sampled at a time; null samples all at once.
    """

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    max_new_tokens: int = Field(256, ge=1, le=1 << 20)
    temperature: float = Field(1.0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0)
    min_p: float = Field(0.0, ge=0, le=1)
    batch_size: int | None = Field(None, ge=1)

    @property
    def truncates(self) -> bool:
        """True if top_p, top_k or min_p removes tokens from the distribution."""
        return self.temperature > 0 and (self.top_p < 1 or self.top_k > 0 or self.min_p > 0)

    @property
    def needs_support(self) -> bool:
        """True if engines must report the ids that truncation kept for each token."""
        return self.truncates

    @field_validator("temperature")
    @classmethod
    def _divides(cls, temperature: float) -> float:
        if 0 < temperature < MIN_TEMPERATURE:  # division by a smaller number overflows fp32
            raise ValueError(f"expected 0 (greedy) or at least {MIN_TEMPERATURE:g}")
        return temperature


# ---------------------------------------------------------------------- Options of the vLLM engines
URL = re.compile(r"https?://(?:\[[0-9a-f:.]+\]|[a-z0-9._-]+):([1-9][0-9]{0,4})/*", re.I | re.A)
LOOPBACK = re.compile(r"(localhost|127\.[0-9.]+|\[?::1\]?)(:[0-9]+)?")


class VLLMOptions(BaseModel):
    """The section `rollout.vllm` of a configuration.

    Attributes:
        options: Arguments of the class vllm.LLM for engine: vllm, such as {gpu_memory_utilization:
            0.4}.
        urls: Servers for engine: vllm-server, each as http://host:port.
        transfer: How servers receive weights. auto is nccl if the policy is on a GPU, otherwise
            gloo.
        address: IPv4 address or name of the trainer's machine at which the servers can reach it.
        timeout: Seconds for one of three tries to sample a step, and for one transfer of weights.
        patience: Seconds to wait for a server that does not respond.
    """

    model_config = ConfigDict(extra="forbid", validate_assignment=True, allow_inf_nan=False)

    options: dict[str, Any] = Field(default_factory=dict)
    urls: list[str] = Field(default_factory=list)
    transfer: Literal["auto", "nccl", "gloo"] = "auto"
    address: str = Field("127.0.0.1", min_length=1)
    timeout: float = Field(600.0, gt=0, le=1e6)
    patience: float = Field(300.0, ge=0, le=1e6)

    @model_validator(mode="before")
    @classmethod
    def _plain_urls(cls, settings: Any) -> Any:
        """Check the URLs first, because pydantic's error would quote a URL with its password."""
        if not isinstance(settings, dict) or "urls" not in settings:
            return settings
        urls = settings["urls"]
        is_list = isinstance(urls, list | tuple) and all(isinstance(url, str) for url in urls)
        found = [URL.fullmatch(url) for url in urls] if is_list else [None]
        if any(url is None or int(url[1]) >= 1 << 16 for url in found):
            expected = "expected http://host:port and nothing else, in a list"
            raise ValueError(f"urls: {expected} (not shown: it may hold a password)")
        return settings | {"urls": [url.rstrip("/").lower() for url in urls]}

    @model_validator(mode="after")
    def _reachable(self) -> VLLMOptions:
        """Check that no server is listed twice, and that all servers can reach `address`."""
        for url in self.urls:
            fits = is_local(url) or not is_local(f"://{self.address}")
            expected = f"an address of this machine that {url} can reach"
            require(fits, "address", expected, self.address)
        names = {url.replace("//localhost:", "//127.0.0.1:") for url in self.urls}
        require(len(names) == len(self.urls), "urls", "every server once", ", ".join(self.urls))
        return self


def is_local(url: str) -> bool:
    """Return whether a URL names this machine's loopback address."""
    return LOOPBACK.fullmatch(url.partition("://")[2]) is not None


# ------------------------------------------------------------------------------------------ Engines
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


# ----------------------------------------------------------------------------------- Random numbers
def seed_of(*parts: int | str) -> int:
    """Derive a 63-bit seed from parts such as (seed, step). It is the same on every machine."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


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


# ----------------------------------------------------------- The sampler of the engine transformers
class Draw(NamedTuple):
    """One sampled token for each of B rows, with the support it was sampled from.

    The last three fields are None if the sampler did not truncate, or if the options do not
    request the support.

    Attributes:
        tokens: (B,) int64, the sampled ids.
        logps: (B,) fp32, log-probabilities under the sampling distribution.
        candidates: (B, K) int64, increasing token ids.
        in_support: (B, K) bool, True for candidates that could be sampled.
        mass: (B,) fp32, probability of the support before truncation.
    """

    tokens: Tensor
    logps: Tensor
    candidates: Tensor | None = None
    in_support: Tensor | None = None
    mass: Tensor | None = None


def sample(scores: Tensor, uniform: Tensor, options: Sampling) -> Draw:
    """Sample a token for each row.

    Temperature 0 selects the most likely token and reports its log-probability at temperature 1.
    Otherwise top_k is applied first, then top_p to the remaining tokens, then min_p.
    Log-probabilities are renormalised over the support.

    A row with NaN or +inf gets the log-probability NaN. The engine checks for NaN once at the end,
    because a check here would cost a GPU sync per token.

    Args:
        scores: (B, V) fp32 logits.
        uniform: (B,) fp32 in [0, 1).
        options: the sampling options.
    """
    # 1. Sample greedily, or from the whole vocabulary. Neither needs sorted logits.
    if options.temperature == 0:
        tokens = scores.argmax(-1)
        return Draw(tokens, scores.gather(-1, tokens[:, None])[:, 0] - scores.logsumexp(-1))
    z = scores if options.temperature == 1 else scores / options.temperature
    top_k = min(options.top_k or z.shape[-1], z.shape[-1])
    if top_k == z.shape[-1] and options.top_p == 1 and options.min_p == 0:
        p = z.softmax(-1)
        tokens = pick(p, uniform)
        return Draw(tokens, p.gather(-1, tokens[:, None])[:, 0].log())
    # 2. Sample from the truncated distribution.
    values, candidates = truncate(z, top_k, options)
    p = values.softmax(-1)
    place = pick(p, uniform)[:, None]
    logps = p.gather(-1, place)[:, 0].log()
    tokens = candidates.gather(-1, place)[:, 0]
    if not options.needs_support:
        return Draw(tokens, logps)
    # 3. Also return the support and its probability mass.
    mass = (values.logsumexp(-1) - z.logsumexp(-1)).exp()
    return Draw(tokens, logps, candidates, values > -torch.inf, mass)


def truncate(z: Tensor, top_k: int, options: Sampling) -> tuple[Tensor, Tensor]:
    """Return the `top_k` most likely tokens of each row, in vocabulary order.

    Args:
        z: (B, V) logits.
        top_k: number of tokens to return.
        options: `top_p` and `min_p` drop further tokens.

    Returns:
        (B, top_k) logits, with -inf for dropped tokens, and (B, top_k) int64 token ids.
    """
    values, ids = z.topk(top_k, dim=-1)
    if options.top_p < 1:
        p = values.softmax(-1)
        # Keep a token if the total probability of all more likely tokens is less than top_p.
        dropped = p.cumsum(-1) - p >= options.top_p
        dropped[:, 0] = False  # keep one token even if top_p rounds to 0 in fp32
        values = values.masked_fill(dropped, float("-inf"))
    if options.min_p > 0:  # column 0 is the most likely token
        values = values.masked_fill(values < values[:, :1] + math.log(options.min_p), float("-inf"))
    # Restore vocabulary order, as `pick` expects. `topk` sorts the ids by likelihood.
    ids, order = ids.sort(dim=-1)
    return values.gather(-1, order), ids


def pick(p: Tensor, uniform: Tensor) -> Tensor:
    """Return the first token of each row whose cumulative probability exceeds the uniform number.

    A token of probability 0 is never returned.

    Args:
        p: (B, V) probabilities.
        uniform: (B,) in [0, 1).

    Returns:
        Token indices, (B,) int64.
    """
    cumulative = p.cumsum(-1)
    total = cumulative[:, -1]
    # uniform * total can round up to total, which no cumulative probability exceeds. Limit the
    # product to the next smaller number, so that a token is found.
    target = torch.minimum(uniform * total, torch.nextafter(total, torch.zeros_like(total)))
    tokens = torch.searchsorted(cumulative, target[:, None], right=True)[:, 0]
    # NaN gives an index past the last token, which would trigger a device-side assert on a GPU.
    return tokens.clamp(max=p.shape[-1] - 1)


class Sampler:
    """Logits processor that makes transformers' `generate` select the token that `sample` draws.

    It must be the last processor, and `generate` must run with `do_sample=False`.

    Args:
        uniforms: (B, L) in [0, 1). Column t determines the t-th new token of each row.
        options: the sampling options.

    Attributes:
        draws: one `Draw` for each position.
    """

    def __init__(self, uniforms: Tensor, options: Sampling) -> None:
        self.uniforms = uniforms
        self.options = options
        self.draws: list[Draw] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return scores, (B, V), that are -inf except for the sampled token of each row."""
        t = len(self.draws)
        draw = sample(scores, self.uniforms[:, t], self.options)
        self.draws.append(draw)
        # With these scores, greedy `generate` must select the sampled token.
        return torch.full_like(scores, float("-inf")).scatter_(-1, draw.tokens[:, None], 0.0)
