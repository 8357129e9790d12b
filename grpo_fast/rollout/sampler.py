"""Sample tokens with temperature, top-k, top-p and min-p.

Each token is sampled with one uniform random number. It is the first token, in vocabulary order,
whose cumulative probability exceeds the number. The number depends only on the seed, the index of
the completion and the position of the token, so samples are reproducible.
"""

from __future__ import annotations

import hashlib
from math import log
from typing import NamedTuple

import torch
from pydantic import BaseModel, ConfigDict, Field, field_validator
from torch import Tensor

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


def seed_of(*parts: int | str) -> int:
    """Derive a 63-bit seed from parts such as (seed, step). It is the same on every machine."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


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
        values = values.masked_fill(values < values[:, :1] + log(options.min_p), float("-inf"))
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
