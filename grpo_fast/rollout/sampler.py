"""The token sampler of the rollout: temperature, top-k, top-p, one uniform number per token, log-probabilities kept.

It sits inside transformers' `generate` as the last logits processor: it picks the token itself and returns scores whose
argmax is that token, so `generate` runs in greedy mode. Against `do_sample=True` that buys three things: one draw per
row from the cumulative distribution (`torch.multinomial` draws one exponential per logit), log-probabilities of the
sampled tokens without keeping a (B, V) tensor per step, and random numbers that depend on (seed, row, position) alone.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor


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
        temperature: 0 is greedy: the most likely token, its log-probability at temperature 1.
        top_k, top_p: 0 and 1.0 are off; top_k first, then top_p over what is left.

    `logps` (B, L) fp32 afterwards holds the log-probabilities under the *processed* distribution, the one sampled from:
    with top_k or top_p they are renormalised over the kept tokens, and so larger than the policy's own.
    Scores that are NaN or +inf make them NaN: a look at the end costs no sync per token.
    """

    def __init__(self, uniforms: Tensor, *, temperature: float, top_k: int = 0, top_p: float = 1.0) -> None:
        self.uniforms = uniforms
        self.temperature, self.top_k, self.top_p = temperature, top_k, top_p
        self.logps = torch.zeros_like(uniforms)
        self.position = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:  # (B, length), (B, V) fp32 -> (B, V)
        if self.temperature == 0:
            tokens = scores.argmax(-1)
            logps = scores.gather(-1, tokens[:, None])[:, 0] - scores.logsumexp(-1)
        else:
            z = self._truncate(scores / self.temperature)
            tokens = draw(z, self.uniforms[:, self.position])
            logps = z.gather(-1, tokens[:, None])[:, 0] - z.logsumexp(-1)
        self.logps[:, self.position] = logps
        self.position += 1
        return scores.fill_(float("-inf")).scatter_(-1, tokens[:, None], 0.0)

    def _truncate(self, z: Tensor) -> Tensor:
        if 0 < self.top_k < z.shape[-1]:
            kth = z.topk(self.top_k, dim=-1).values[:, -1:]
            z = z.masked_fill(z < kth, float("-inf"))
        if self.top_p < 1:
            ordered, index = z.sort(dim=-1, descending=True)
            p = ordered.softmax(-1)
            # A token stays while the mass before it is below top_p, so the most likely one always does.
            beyond = p.cumsum(-1) - p >= self.top_p
            z = z.masked_fill(beyond.scatter(-1, index, beyond), float("-inf"))
        return z


def draw(z: Tensor, uniform: Tensor) -> Tensor:  # (B, V) logits, (B,) in [0, 1) -> (B,) int64
    """Inverse-CDF draw: the first token whose cumulative probability exceeds `uniform`; never one of probability 0."""
    cumulative = z.softmax(-1).cumsum(-1)
    total = cumulative[:, -1]
    # uniform·total can round up to total, beyond every token.
    target = torch.minimum(uniform * total, torch.nextafter(total, torch.zeros_like(total)))
    tokens = torch.searchsorted(cumulative, target[:, None], right=True)[:, 0]
    return tokens.clamp(max=z.shape[-1] - 1)  # NaN leads beyond the last: an index that stops a GPU
