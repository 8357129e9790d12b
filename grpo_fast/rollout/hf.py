"""Rollouts by transformers' own `generate`: batched, left-padded, with our sampler inside."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from grpo_fast.data import reason
from grpo_fast.rollout.sampler import NonFiniteLogits, Sampler, Sampling, seed_of

Prompt = str | list[dict[str, str]]


@dataclass
class Rollout:
    """N·G completions, the G of one prompt side by side."""

    prompts: list[str] = field(default_factory=list)  # of each completion (so each G times)
    prompt_ids: list[list[int]] = field(default_factory=list)
    completion_ids: list[list[int]] = field(default_factory=list)  # up to and with the first EOS
    sampling_logps: list[Tensor] = field(default_factory=list)  # (|completion|,) fp32, see Sampler
    texts: list[str] = field(default_factory=list)  # completions without special tokens
    truncated: list[bool] = field(default_factory=list)  # no EOS within max_new_tokens

    @property
    def lengths(self) -> list[int]:
        return [len(ids) for ids in self.completion_ids]


def generate(
    policy: Any,
    prompts: Sequence[Prompt],
    options: Sampling,
    *,
    group_size: int,
    seed: int | tuple[int | str, ...],
    places: Sequence[int] | None = None,
) -> Rollout:
    """G = `group_size` completions of each prompt.

    Args:
        policy: a `Policy` (model, tokenizer, eos_ids, `generation()`).
        prompts: texts, or chat messages for the tokenizer's template.
        seed: an int or a tuple such as (seed, step). The random number of a token depends on it,
            the completion's place and the token's position only, not on `options.batch_size`.
        places: of the prompts in the whole step's batch, rising; None: they are all of it.

    Raises:
        ValueError: a prompt that the tokenizer does not take, without tokens, with unknown ones,
            or with too many for the model and `options.max_new_tokens`.
        NonFiniteLogits: the policy gives NaN.
    """
    texts, ids = encode_for(policy, prompts, options.max_new_tokens)
    repeated = [i for i in range(len(ids)) for _ in range(group_size)]
    parts = seed if isinstance(seed, tuple) else (seed,)
    generator = torch.Generator().manual_seed(seed_of("rollout", *parts))
    last = len(ids) if places is None else max(places, default=-1) + 1
    every = torch.rand(last * group_size, options.max_new_tokens, generator=generator)
    uniforms = every if places is None else torch.cat([every[:0], *(
        every[place * group_size : (place + 1) * group_size] for place in places
    )])  # fmt: skip
    rollout = Rollout()
    size = options.batch_size or max(len(repeated), 1)
    with policy.generation():
        for start in range(0, len(repeated), size):
            chosen = repeated[start : start + size]
            rollout.prompts += [texts[i] for i in chosen]
            rollout.prompt_ids += [ids[i] for i in chosen]
            _generate_batch(policy, options, uniforms[start : start + size], rollout)
    rollout.texts = policy.tokenizer.batch_decode(rollout.completion_ids, skip_special_tokens=True)
    return rollout


def check_prompts(policy: Any, prompts: Sequence[Prompt], max_new_tokens: int) -> None:
    """Raise the ValueError for prompts that `generate` would raise, before a run has begun.

    Only those that may be too long are encoded: a token has at least one byte, and a chat template
    adds less than half of what a model has room for.
    """
    room = policy.positions - max_new_tokens
    long = [p for p in prompts if 2 * len(str(p).encode()) > room]
    encode_for(policy, long, max_new_tokens)


def encode_for(
    policy: Any, prompts: Sequence[Prompt], max_new_tokens: int
) -> tuple[list[str], list[list[int]]]:
    """`encode_prompts`, and a ValueError for what the policy cannot take, before any memory is."""
    texts, ids = encode_prompts(policy.tokenizer, prompts)
    rows = policy.lm.get_input_embeddings().weight.shape[0]
    for text, tokens in zip(texts, ids, strict=True):
        if len(tokens) > policy.positions:
            raise ValueError(
                f"prompts: expected at most {policy.positions} tokens (max_position_embeddings of "
                f"the model), got {len(tokens)} in {text[:60]!r}"
            )
        room = policy.positions - len(tokens) + 1  # the last token is not fed
        if max_new_tokens > room:
            raise ValueError(
                f"max_new_tokens: expected at most {room} behind a prompt of {len(tokens)} tokens "
                f"(max_position_embeddings of the model: {policy.positions}), got {max_new_tokens}"
            )
        if max(tokens) >= rows:
            raise ValueError(
                f"prompts: expected token ids below {rows}, the rows of the model's embedding, "
                f"got {max(tokens)} in {text[:60]!r}"
            )
    return texts, ids


def encode_prompts(tokenizer: Any, prompts: Sequence[Prompt]) -> tuple[list[str], list[list[int]]]:
    """Text and token ids of each prompt; chat messages go through the tokenizer's template."""
    texts: list[str] = []
    ids: list[list[int]] = []
    for prompt in prompts:
        plain = isinstance(prompt, str)
        text: Any = prompt
        try:
            if not plain:  # the template writes the special tokens itself
                text = tokenizer.apply_chat_template(
                    prompt, tokenize=False, add_generation_prompt=True
                )
            encoded = tokenizer(text, add_special_tokens=plain)["input_ids"]
        except Exception as error:  # a template is a program, and tokenizers raise plain Exception
            taken = "expected what the tokenizer and its chat template take"
            came = str(prompt)[:60]
            raise ValueError(f"prompts: {taken}, got {came!r}: {reason(error)}") from error
        if not encoded:
            raise ValueError(f"prompts: expected at least one token, came {prompt!r}")
        texts.append(text)
        ids.append(encoded)
    return texts, ids


def _generate_batch(policy: Any, options: Sampling, uniforms: Tensor, rollout: Rollout) -> None:
    """Completions for the last prompts of `rollout`, one for each row of `uniforms`."""
    prompts, device, pad = rollout.prompt_ids[-len(uniforms) :], policy.device, policy.pad_id
    longest = max(map(len, prompts))
    input_ids = torch.tensor([[pad] * (longest - len(p)) + p for p in prompts], device=device)
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=device)
    sampler = Sampler(uniforms.to(device), options)
    output = policy.lm.generate(
        input_ids=input_ids, attention_mask=mask, max_new_tokens=options.max_new_tokens,
        do_sample=False, logits_processor=[sampler], eos_token_id=sorted(policy.eos_ids),
        pad_token_id=pad, synced_gpus=False,  # ranks do not wait for each other's longest
    )  # fmt: skip
    rows, logps = output[:, longest:].tolist(), sampler.logps.cpu()
    for row, row_logps in zip(rows, logps, strict=True):
        end = next((t + 1 for t, token in enumerate(row) if token in policy.eos_ids), None)
        if row_logps[:end].isnan().any():
            raise NonFiniteLogits("the policy's logits are NaN or infinite")
        rollout.truncated.append(end is None)
        rollout.completion_ids.append(row[:end])
        rollout.sampling_logps.append(row_logps[: len(row[:end])].clone())
