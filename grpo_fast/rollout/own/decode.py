"""Decoding loop of the engine `transformers`.

The loop computes each prompt once. Then every step samples one token of each completion.
Completions that have ended are removed from the batch.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from grpo_fast.attention import Head, TreeLayout, split_recurrent_layers
from grpo_fast.kernels.cpu.layers import linear
from grpo_fast.kernels.head.products import matmul_logits
from grpo_fast.kernels.route import uses_csrc_gemm
from grpo_fast.kernels.types import Support
from grpo_fast.rollout.engine import Draw, Sampling, sample
from grpo_fast.rollout.own.cache import RolloutCache, register
from grpo_fast.rollout.own.decoder import decoder_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from grpo_fast.rollout.own.model import SampledModel

PREFILL_TOKENS = 1 << 14  # most prompt tokens in one forward pass, unless one prompt is longer
# Number of tokens between two checks for ended completions. On a GPU a check costs a sync.
CHECK_EVERY = {"cpu": 1}
CHECK_EVERY_ON_GPU = 16
# Remove finished completions once at most this fraction of the batch is still being sampled.
# Removing them copies the cache, which costs more than it saves if few completions have finished.
FULL = 0.8


class SupportRecorder:
    """Recorder of the supports of B completions with at most L tokens each, on the CPU."""

    def __init__(self, rows: int, length: int) -> None:
        self.counts = torch.zeros(rows, length, dtype=torch.int64)
        self.masses = torch.zeros(rows, length, dtype=torch.float32)
        self.ids: list[Tensor] = []
        self.rows: list[Tensor] = []  # the completion of each entry of `ids`

    def add(self, rows: Tensor, t: int, draw: Draw) -> None:
        """Record the support (the ids that truncation kept) of token t of the given completions.

        This costs a GPU sync. If the sampler did not truncate, nothing is recorded.
        """
        if draw.candidates is None or draw.in_support is None or draw.mass is None:
            return
        in_support = draw.in_support.cpu()
        rows = rows.cpu()
        counts = in_support.sum(1)
        self.counts[rows, t] = counts
        self.masses[rows, t] = draw.mass.cpu()
        self.ids.append(draw.candidates.to("cpu", torch.int32)[in_support])
        self.rows.append(rows.repeat_interleave(counts))

    def of_completions(self, lengths: Sequence[int]) -> list[tuple[Support | None, Tensor | None]]:
        """Return the support of each completion's first n tokens, and its probability mass.

        Args:
            lengths: number n of tokens of each completion.

        Returns:
            The support of n tokens and its mass, (n,) fp32, for each completion. Both are None if
            the sampler did not truncate.
        """
        if not self.ids:
            return [(None, None)] * len(lengths)
        # The sort must be stable, so that the tokens of a completion stay in order.
        order = torch.cat(self.rows).argsort(stable=True)
        ids = torch.cat(self.ids)[order].split(self.counts.sum(1).tolist())
        found: list[tuple[Support | None, Tensor | None]] = []
        for row, counts, mass, length in zip(ids, self.counts, self.masses, lengths, strict=True):
            offsets = pad(counts[:length].cumsum(0), (1, 0))
            # Copy the ids, because a view would keep the ids of the full batch in memory.
            support = Support(row[: int(offsets[-1])].clone(), offsets)
            found.append((support, mass[:length].clone()))
        return found


class Decoded(NamedTuple):
    """Sampled tokens of B completions with L tokens each, including tokens after an EOS.

    Attributes:
        tokens: (B, L) int64.
        logps: (B, L) fp32.
        support: support of the sampled tokens.
    """

    tokens: Tensor
    logps: Tensor
    support: SupportRecorder


@torch.inference_mode()  # about 10% faster than no_grad for small models
def decode(
    policy: SampledModel,
    prompts: Sequence[Sequence[int]],
    counts: Sequence[int],
    options: Sampling,
    numbers: Tensor,
    *,
    stop_at_eos: bool = True,
    starts: Sequence[int] = (),
) -> Decoded:
    """Sample completions of several prompts. Call it inside `with policy.generation():`.

    Args:
        policy: a `Policy` or `SampledModel`.
        prompts: token ids of each prompt.
        counts: number of completions of each prompt. Their sum is B.
        options: the sampling options.
        numbers: (B, L) uniform random numbers in [0, 1), one for each sampled token.
        stop_at_eos: False samples L tokens of every completion.
        starts: position of each prompt's first token. Empty means 0. It is only set when this loop
            is compared with the model's forward pass.

    Raises:
        ValueError: packed attention does not support a layer of the model.
    """
    # 1. Compute the prompts' keys, values and last hidden states.
    device = policy.device
    length = options.max_new_tokens
    policy.lm.set_attn_implementation(register())
    split_recurrent_layers(policy.lm.base_model)
    head = policy.head
    eos = torch.tensor(sorted(policy.eos_ids), device=device)
    cache = RolloutCache([len(p) for p in prompts], counts, length, device)
    numbers = numbers.to(device)
    rows = torch.arange(len(numbers), device=device)  # completions that have not ended
    repeats = torch.tensor(counts, device=device)
    hidden = prefill(policy, prompts, cache, starts).repeat_interleave(repeats, 0)
    ends = [n + start for n, start in zip(cache.lengths, starts or [0] * len(counts), strict=True)]
    places = torch.tensor(ends, device=device).repeat_interleave(repeats)
    ended = torch.zeros(len(numbers), dtype=torch.bool, device=device)
    tokens = torch.zeros(numbers.shape, dtype=torch.int64, device=device)
    decoded = Decoded(tokens, torch.zeros_like(numbers), SupportRecorder(*numbers.shape))
    every = CHECK_EVERY.get(device.type, CHECK_EVERY_ON_GPU)
    trunk = policy.lm.base_model
    # 2. Compute the steps with the C++ decoder if it supports the model, otherwise with the model's
    #    modules. With `starts`, this loop is being compared with the forward pass. It then uses the
    #    modules, because the decoder is compared with them separately.
    decoder = None if starts else decoder_of(trunk, head, cache, forward)
    step = decoder or functools.partial(forward, trunk)
    product = decoder.product if decoder else functools.partial(linear_of, head)
    # 3. Sample a token of each completion, then compute its hidden state.
    for t in range(length):
        draw = sample(head.logits_of(product(hidden)), numbers[rows, t], options)
        decoded.tokens[rows, t] = draw.tokens
        decoded.logps[rows, t] = draw.logps
        decoded.support.add(rows, t, draw)
        ended |= torch.isin(draw.tokens, eos) & stop_at_eos
        if t + 1 == length:
            break
        new = draw.tokens
        if (t + 1) % every == 0:
            stay = (~ended).nonzero()[:, 0].tolist()
            if not stay:
                break
            if len(stay) <= FULL * len(rows):
                cache.drop_ended(stay)
                rows, places, ended, new = (x[stay] for x in (rows, places, ended, new))
        hidden = step(new, places + t, cache)
        cache.time += 1
    return decoded


def prefill(
    policy: SampledModel,
    prompts: Sequence[Sequence[int]],
    cache: RolloutCache,
    starts: Sequence[int] = (),
) -> Tensor:
    """Fill the cache with the prompts.

    Returns:
        The last hidden state of each prompt, (N, H).
    """
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
    """Yield the prompts, in order, in chunks of at most PREFILL_TOKENS tokens."""
    chunk: list[Sequence[int]] = []
    for prompt in prompts:
        if chunk and sum(map(len, chunk)) + len(prompt) > PREFILL_TOKENS:
            yield chunk
            chunk = []
        chunk.append(prompt)
    yield chunk


def forward(trunk: PreTrainedModel, ids: Tensor, positions: Tensor, cache: RolloutCache) -> Tensor:
    """Compute the hidden states of T tokens with the model's modules.

    Args:
        trunk: the model without its LM head.
        ids: (T,) int64 token ids.
        positions: (T,) int64.
        cache: the keys and values, which receive the new tokens.

    Returns:
        The final hidden states, (T, H).
    """
    # Pass a dummy 4-D mask while decoding. Without a mask, transformers inspects position_ids for
    # packed sequences, which costs a GPU sync per token.
    mask = None if cache.layout is not None else ids.new_zeros(1, 1, 1, 1)
    output = trunk(
        input_ids=ids[None], position_ids=positions[None], attention_mask=mask, use_cache=False,
        rollout_cache=cache,
    )  # fmt: skip
    return output.last_hidden_state[0]


def linear_of(head: Head, hidden: Tensor) -> Tensor:
    """Return hidden·Wᵀ + bias, without the LM head's scale and softcap."""
    hidden = hidden.to(head.weight.dtype)
    if head.weight.dtype == torch.bfloat16 and uses_csrc_gemm(head.weight):
        # Keep fp32 logits, as the fused head does in training. Torch would round them to bf16.
        logits = hidden.new_empty((len(hidden), len(head.weight)), dtype=torch.float32)
        matmul_logits(hidden, head.weight, out=logits)
        return logits if head.bias is None else logits.add_(head.bias)
    return linear(hidden, head.weight, head.bias)
