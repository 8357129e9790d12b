"""Sampling of tokens: temperature, top-k, top-p, min-p, one uniform number per token.

The sampled token is the first whose cumulative probability, in the order of the vocabulary, exceeds
the uniform number, which depends only on (seed, place, position).
"""

from __future__ import annotations

import hashlib
from math import log
from typing import NamedTuple

import torch
from pydantic import BaseModel, ConfigDict, Field, field_validator
from torch import Tensor

COLDEST = 1e-6


class Sampling(BaseModel):
    """Options of the sampler."""

    model_config = ConfigDict(
        extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True
    )  # fmt: skip

    max_new_tokens: int = Field(256, ge=1, le=1 << 20)
    """Most tokens of a completion."""
    temperature: float = Field(1.0, ge=0)
    """Sampling temperature; 0 is greedy."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Sample from the likeliest tokens that hold this probability; 1 keeps all."""
    top_k: int = Field(0, ge=0)
    """Sample from this many likeliest tokens; 0 keeps all."""
    min_p: float = Field(0.0, ge=0, le=1)
    """Drop tokens less likely than this times the likeliest token; 0 keeps all."""
    batch_size: int | None = Field(None, ge=1)
    """Completions at a time; null samples all at once."""

    @property
    def truncates(self) -> bool:
        return self.temperature > 0 and (self.top_p < 1 or self.top_k > 0 or self.min_p > 0)

    @property
    def wants_kept(self) -> bool:
        """Whether engines report the tokens that truncation kept."""
        return self.truncates

    @field_validator("temperature")
    @classmethod
    def _divides(cls, temperature: float) -> float:
        if 0 < temperature < COLDEST:  # logits divided by less overflow fp32
            raise ValueError(f"expected 0 (greedy) or at least {COLDEST:g}")
        return temperature


def seed_of(*parts: int | str) -> int:
    """Return a 63-bit seed from parts such as (seed, step), the same on every machine."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


class Draw(NamedTuple):
    """One token for each of B rows, and the tokens it was drawn from."""

    tokens: Tensor  # (B,) int64
    logps: Tensor  # (B,) fp32, of the distribution that was drawn from
    # (B, K) int64, rising token ids; None: the whole vocabulary, or not requested
    candidates: Tensor | None = None
    kept: Tensor | None = None  # (B, K) bool: the candidates that could be drawn
    mass: Tensor | None = None  # (B,) fp32: probability of these before truncation


def sample(scores: Tensor, uniform: Tensor, options: Sampling) -> Draw:  # (B, V) fp32, (B,)
    """Draw a token for each row.

    Temperature 0 takes the most likely token, with its log-probability at temperature 1. Otherwise
    top_k is applied first, then top_p to the remaining tokens, then min_p; log-probabilities are
    renormalised over the kept tokens. Scores that are NaN or +inf make the log-probability NaN,
    which is checked once at the end: no sync per token.
    """
    if options.temperature == 0:
        tokens = scores.argmax(-1)
        return Draw(tokens, scores.gather(-1, tokens[:, None])[:, 0] - scores.logsumexp(-1))
    z = scores if options.temperature == 1 else scores / options.temperature
    top_k = min(options.top_k or z.shape[-1], z.shape[-1])
    if top_k == z.shape[-1] and options.top_p == 1 and options.min_p == 0:
        p = z.softmax(-1)
        tokens = pick(p, uniform)
        return Draw(tokens, p.gather(-1, tokens[:, None])[:, 0].log())
    values, candidates = truncate(z, top_k, options)
    p = values.softmax(-1)
    place = pick(p, uniform)[:, None]
    logps = p.gather(-1, place)[:, 0].log()
    tokens = candidates.gather(-1, place)[:, 0]
    if not options.wants_kept:
        return Draw(tokens, logps)
    mass = (values.logsumexp(-1) - z.logsumexp(-1)).exp()
    return Draw(tokens, logps, candidates, values > -torch.inf, mass)


def truncate(z: Tensor, most: int, options: Sampling) -> tuple[Tensor, Tensor]:
    """Return the `most` likeliest logits of each row by rising id; dropped ones are −inf."""
    values, ids = z.topk(most, dim=-1)
    if options.top_p < 1:
        p = values.softmax(-1)
        # A token stays while the mass before it is below top_p: the most likely one does.
        dropped = p.cumsum(-1) - p >= options.top_p
        dropped[:, 0] = False  # also where top_p is 0 in fp32
        values = values.masked_fill(dropped, float("-inf"))
    if options.min_p > 0:  # the most likely one stands first
        values = values.masked_fill(values < values[:, :1] + log(options.min_p), float("-inf"))
    # `pick` draws in the order of the vocabulary, not of the likelihood.
    ids, order = ids.sort(dim=-1)
    return values.gather(-1, order), ids


def pick(p: Tensor, uniform: Tensor) -> Tensor:  # (B, V), (B,) in [0, 1) -> (B,) int64
    """Return the first token whose cumulative probability exceeds `uniform`, never one of 0."""
    cumulative = p.cumsum(-1)
    total = cumulative[:, -1]
    # uniform·total can round up to total, beyond every token.
    target = torch.minimum(uniform * total, torch.nextafter(total, torch.zeros_like(total)))
    tokens = torch.searchsorted(cumulative, target[:, None], right=True)[:, 0]
    return tokens.clamp(
        max=p.shape[-1] - 1
    )  # NaN gives an index beyond the last token, which is a device assert on GPUs


class Sampler:
    """`sample` as the last logits processor of transformers' `generate`, in greedy mode.

    Args:
        uniforms: (B, L) in [0, 1); column t decides the t-th new token of each row.

    After generation `logps` (B, L) fp32 has the log-probabilities, and `drawn` the draw of each
    position.
    """

    def __init__(self, uniforms: Tensor, options: Sampling) -> None:
        self.uniforms = uniforms
        self.options = options
        self.logps = torch.zeros_like(uniforms)
        self.drawn: list[Draw] = []

    # (B, length), (B, V) fp32 -> (B, V)
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        t = len(self.drawn)
        drawn = sample(scores, self.uniforms[:, t], self.options)
        self.drawn.append(drawn)
        self.logps[:, t] = drawn.logps
        # `generate` is greedy: it takes the only token that is left.
        return torch.full_like(scores, float("-inf")).scatter_(-1, drawn.tokens[:, None], 0.0)
