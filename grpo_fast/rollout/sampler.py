"""How completions are drawn: temperature, top-k, top-p, one uniform number per token.

It sits inside transformers' `generate` as the last logits processor: it picks the token itself and
returns scores whose argmax is that token, so `generate` runs in greedy mode. Against
`do_sample=True` that buys three things: one draw per row from the cumulative distribution
(`torch.multinomial` draws one exponential per logit), log-probabilities of the sampled tokens
without keeping a (B, V) tensor per step, and random numbers that depend on (seed, row, position)
alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import torch
from pydantic import BaseModel, ConfigDict, Field, field_validator
from torch import Tensor

COLDEST = 1e-6


class Sampling(BaseModel):
    """How completions are drawn."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    max_new_tokens: int = Field(256, ge=1, le=1 << 20)
    temperature: float = Field(1.0, ge=0)  # 0: greedy
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0)  # 0: off
    batch_size: int | None = Field(None, ge=1)  # completions at a time; None: all at once

    @property
    def truncates(self) -> bool:
        """Whether some tokens are never drawn."""
        return self.temperature > 0 and (self.top_p < 1 or self.top_k > 0)

    @property
    def wants_kept(self) -> bool:
        """Whether an engine hands on what each token was drawn from, where it truncates."""
        return False

    @field_validator("temperature")
    @classmethod
    def _divides(cls, temperature: float) -> float:
        if 0 < temperature < COLDEST:  # logits divided by less overflow fp32
            raise ValueError(f"expected 0 (greedy) or at least {COLDEST:g}")
        return temperature


def seed_of(*parts: int | str) -> int:
    """A 63-bit seed from a tuple such as (seed, step): the same on every machine and Python."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


class NonFiniteLogits(RuntimeError):
    """The policy's logits are NaN or infinite: nothing can be sampled from them."""


class Sampler:
    """A logits processor that samples.

    Args:
        uniforms: (B, L) in [0, 1); column t decides the t-th new token of each row.
        options: greedy takes the most likely token, its log-probability at temperature 1; else
            top_k comes first, then top_p over what is left.
        on_kept: told of every step's logits, and of the same with -inf where top_k or top_p cut.

    `logps` (B, L) fp32 afterwards holds the log-probabilities under the *processed* distribution,
    the one sampled from: with top_k or top_p they are renormalised over the kept tokens, and so
    larger than the policy's own. Scores that are NaN or +inf make them NaN: a look at the end costs
    no sync per token.
    """

    def __init__(
        self,
        uniforms: Tensor,
        options: Sampling,
        on_kept: Callable[[Tensor, Tensor], None] | None = None,
    ) -> None:
        self.uniforms, self.options, self.on_kept = uniforms, options, on_kept
        self.logps = torch.zeros_like(uniforms)
        self.position = 0

    # (B, length), (B, V) fp32 -> (B, V)
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if self.options.temperature == 0:
            tokens = scores.argmax(-1)
            logps = scores.gather(-1, tokens[:, None])[:, 0] - scores.logsumexp(-1)
        else:
            whole = scores / self.options.temperature
            z = self._truncate(whole)
            if self.on_kept is not None and z is not whole:
                self.on_kept(whole, z)
            tokens = draw(z, self.uniforms[:, self.position])
            logps = z.gather(-1, tokens[:, None])[:, 0] - z.logsumexp(-1)
        self.logps[:, self.position] = logps
        self.position += 1
        return scores.fill_(float("-inf")).scatter_(-1, tokens[:, None], 0.0)

    def _truncate(self, z: Tensor) -> Tensor:
        top_k, top_p = self.options.top_k, self.options.top_p
        if 0 < top_k < z.shape[-1]:
            kth = z.topk(top_k, dim=-1).values[:, -1:]
            z = z.masked_fill(z < kth, float("-inf"))
        if top_p < 1:
            ordered, index = z.sort(dim=-1, descending=True)
            p = ordered.softmax(-1)
            # A token stays while the mass before it is below top_p: the most likely one does.
            beyond = p.cumsum(-1) - p >= top_p
            beyond[:, 0] = False  # also where top_p is 0 in fp32
            z = z.masked_fill(beyond.scatter(-1, index, beyond), float("-inf"))
        return z


def draw(z: Tensor, uniform: Tensor) -> Tensor:  # (B, V) logits, (B,) in [0, 1) -> (B,) int64
    """The first token whose cumulative probability exceeds `uniform`; none of probability 0."""
    cumulative = z.softmax(-1).cumsum(-1)
    total = cumulative[:, -1]
    # uniform·total can round up to total, beyond every token.
    target = torch.minimum(uniform * total, torch.nextafter(total, torch.zeros_like(total)))
    tokens = torch.searchsorted(cumulative, target[:, None], right=True)[:, 0]
    return tokens.clamp(max=z.shape[-1] - 1)  # NaN leads beyond the last: an index that stops a GPU
