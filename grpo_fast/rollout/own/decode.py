"""The loop that samples: prompts once, then a token of every completion at a time."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from grpo_fast.attention import Head, TreeLayout
from grpo_fast.kernels.cpu.layers import linear
from grpo_fast.rollout.engine import Kept
from grpo_fast.rollout.own.cache import RolloutCache, register
from grpo_fast.rollout.own.decoder import decoder_of
from grpo_fast.rollout.sampler import Drawn, Sampling, sample

PREFILL_TOKENS = 1 << 14  # of prompts in one forward pass; a longer one passes alone
LOOK_EVERY = {"cpu": 1}  # tokens between two looks at who has ended
FULL = 0.8  # fraction of a batch that still samples, below which the others leave


class KeptIds:
    """The kept ids of B completions of at most L tokens, on the CPU."""

    def __init__(self, rows: int, length: int) -> None:
        self.counts = torch.zeros(rows, length, dtype=torch.int64)
        self.masses = torch.zeros(rows, length)
        self.ids: list[Tensor] = []
        self.rows: list[Tensor] = []  # of each of `ids`

    def add(self, rows: Tensor, t: int, drawn: Drawn) -> None:
        """Token t of these rows. Waits for the device where something was truncated."""
        if drawn.candidates is None or drawn.kept is None or drawn.mass is None:
            return
        kept, rows = drawn.kept.cpu(), rows.cpu()
        counts = kept.sum(1)
        self.counts[rows, t], self.masses[rows, t] = counts, drawn.mass.cpu()
        self.ids.append(drawn.candidates.to("cpu", torch.int32)[kept])
        self.rows.append(rows.repeat_interleave(counts))

    def by_completion(self, lengths: Sequence[int]) -> list[Kept | None]:
        if not self.ids:
            return [None] * len(lengths)
        order = torch.cat(self.rows).argsort(stable=True)  # stable: by time within a row
        ids = torch.cat(self.ids)[order].split(self.counts.sum(1).tolist())
        sets: list[Kept | None] = []
        for own, counts, mass, length in zip(ids, self.counts, self.masses, lengths, strict=True):
            offsets = torch.zeros(length + 1, dtype=torch.int64)
            torch.cumsum(counts[:length], 0, out=offsets[1:])
            # Clones: views would keep the ids of the whole batch alive.
            sets.append(Kept(own[: int(offsets[-1])].clone(), offsets, mass[:length].clone()))
        return sets


class Decoded(NamedTuple):
    """B completions of L tokens each: what follows an EOS is not cut off yet."""

    tokens: Tensor  # (B, L) int64
    logps: Tensor  # (B, L) fp32
    kept: KeptIds


@torch.inference_mode()  # less work per operation than no_grad: a tenth of a small model's time
def decode(
    policy: Any,
    prompts: Sequence[Sequence[int]],
    counts: Sequence[int],
    options: Sampling,
    numbers: Tensor,  # (B, L) in [0, 1)
    *,
    stop_at_eos: bool = True,
    starts: Sequence[int] = (),
) -> Decoded:
    """Sample `counts[n]` completions of prompt n, in the order of the prompts, by random `numbers`.

    Call it in `policy.generation()`.

    Args:
        starts: the position of each prompt's first token, for trials of few short prompts; empty:
            all are 0.

    Raises:
        ValueError: a layer that packed attention refuses.
    """
    device, length = policy.device, options.max_new_tokens
    policy.lm.set_attn_implementation(register())
    head, eos = policy.head, torch.tensor(sorted(policy.eos_ids), device=device)
    cache = RolloutCache([len(p) for p in prompts], counts, length, device)
    numbers = numbers.to(device)
    rows = torch.arange(len(numbers), device=device)  # those that still sample
    repeats = torch.tensor(counts, device=device)
    hidden = prefill(policy, prompts, cache, starts).repeat_interleave(repeats, 0)
    ends = [n + start for n, start in zip(cache.lengths, starts or [0] * len(counts), strict=True)]
    places = torch.tensor(ends, device=device).repeat_interleave(repeats)
    ended = torch.zeros(len(numbers), dtype=torch.bool, device=device)
    tokens = torch.zeros(numbers.shape, dtype=torch.int64, device=device)
    decoded = Decoded(tokens, torch.zeros_like(numbers), KeptIds(*numbers.shape))
    every = LOOK_EVERY.get(device.type, 16)
    trunk = policy.lm.base_model
    # Only the trial of this loop moves prompts to other positions.
    decoder = None if starts else decoder_of(trunk, head, cache, forward)
    step = decoder or functools.partial(forward, trunk)
    product = decoder.product if decoder else functools.partial(linear_of, head)
    for t in range(length):
        drawn = sample(logits_of(head, product(hidden)), numbers[rows, t], options)
        decoded.tokens[rows, t], decoded.logps[rows, t] = drawn.tokens, drawn.logps
        decoded.kept.add(rows, t, drawn)
        ended |= torch.isin(drawn.tokens, eos) & stop_at_eos
        if t + 1 == length:
            break
        new = drawn.tokens
        if (t + 1) % every == 0:
            stay = (~ended).nonzero()[:, 0].tolist()
            if not stay:
                break
            if len(stay) <= FULL * len(rows):
                cache.drop(stay)
                rows, places, ended, new = (x[stay] for x in (rows, places, ended, new))
        hidden = step(new, places + t, cache)
        cache.time += 1
    return decoded


def prefill(
    policy: Any, prompts: Sequence[Sequence[int]], cache: RolloutCache, starts: Sequence[int] = ()
) -> Tensor:
    """Fill the cache with the prompts and return the last hidden state of each, (N, H)."""
    last = []
    for chunk in chunks(prompts):
        cache.layout = TreeLayout.of([len(prompt) for prompt in chunk], policy.device)
        ids = torch.tensor([token for prompt in chunk for token in prompt], device=policy.device)
        places = cache.layout.position_ids[0]
        if starts:
            places = places + torch.tensor(starts, device=policy.device)[cache.layout.segments]
        states = forward(policy.lm.base_model, ids, places, cache)
        last.append(states[cache.layout.cu_seqlens[1:].long() - 1])
    cache.close_prompts()
    return torch.cat(last)


def chunks(prompts: Sequence[Sequence[int]]) -> Iterator[list[Sequence[int]]]:
    """Cut the prompts, in their order, into chunks of at most PREFILL_TOKENS tokens."""
    chunk: list[Sequence[int]] = []
    for prompt in prompts:
        if chunk and sum(map(len, chunk)) + len(prompt) > PREFILL_TOKENS:
            yield chunk
            chunk = []
        chunk.append(prompt)
    yield chunk


def forward(trunk: Any, ids: Tensor, positions: Tensor, cache: RolloutCache) -> Tensor:
    """Return the final hidden states (T, H) of token ids (T,) at their positions."""
    # Pass a dummy 4-D mask while decoding. Without a mask, transformers inspects position_ids for
    # packed sequences, which costs a GPU sync per token.
    mask = None if cache.layout is not None else ids.new_zeros(1, 1, 1, 1)
    output = trunk(
        input_ids=ids[None], position_ids=positions[None], attention_mask=mask, use_cache=False,
        rollout_cache=cache,
    )  # fmt: skip
    return output.last_hidden_state[0]


def linear_of(head: Head, hidden: Tensor) -> Tensor:
    return linear(hidden.to(head.weight.dtype), head.weight, head.bias)


def logits_of(head: Head, product: Tensor) -> Tensor:
    logits = product.float()
    if head.logit_scale != 1.0:
        logits = logits * head.logit_scale
    if head.softcap is not None:
        logits = head.softcap * torch.tanh(logits / head.softcap)
    return logits
