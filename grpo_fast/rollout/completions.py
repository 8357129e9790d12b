"""Encode prompts, sample completions by an engine, decode them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.functional import pad

from grpo_fast.data import reason
from grpo_fast.errors import conflict, require
from grpo_fast.kernels.support import Support
from grpo_fast.rollout.engine import EOS, Completion, Engine, Seed
from grpo_fast.rollout.own.engine import TransformersEngine
from grpo_fast.rollout.own.model import SampledModel
from grpo_fast.rollout.sampler import Sampling
from grpo_fast.rollout.samples import COMPLETION, PROMPT, Samples

Prompt = str | list[dict[str, str]] | list[int]  # text, chat messages or token ids


def generate(
    model: Any,
    prompts: Sequence[Prompt],
    options: Sampling | None = None,
    *,
    group_size: int = 1,
    seed: Seed = 0,
    tokenizer: Any = None,
    engine: Engine | None = None,
    places: Sequence[int] | None = None,
    **sampling: Any,
) -> Samples:
    """Sample G = `group_size` completions of each prompt; each prompt is computed once::

        done = generate(model, prompts, group_size=8, tokenizer=tokenizer, max_new_tokens=64)
        rewards = [score(text) for text in done.texts]

    Args:
        model: a transformers causal LM, or a peft model around one, which is left unchanged; or
            the trainer's `Policy`.
        prompts: texts, chat messages for the tokenizer's template, or token ids.
        options: the sampling options; or pass the fields of `Sampling` as keywords.
        seed: an int or a tuple such as (seed, step). The random number of a token depends only on
            the seed, the completion's place and the token's position, not on `batch_size`.
        tokenizer: the model's tokenizer; a `Policy` has one. A `SampledModel` without a tokenizer
            takes token ids only, and all texts of the result are empty.
        engine: samples with the weights it has; None: the model itself samples.
        places: index of each prompt in the batch of all ranks, rising; None: `prompts` is the
            whole batch.

    Returns:
        A table of the samples with their texts; `group` holds each prompt's place.

    Raises:
        ValueError: a prompt that the tokenizer or the model does not take, or without room for
            `options.max_new_tokens`; places that do not rise; keywords that `Sampling` refuses.
        NonFiniteLogits: the model's logits are NaN.
    """
    # 1. Check the options.
    policy = SampledModel(model, tokenizer) if isinstance(model, nn.Module) else model
    if options is not None and sampling:
        raise conflict("options", f"the keywords {sorted(sampling)}", "pass one of them")
    options = options or Sampling(**sampling)
    require(group_size >= 1, "group_size", "at least 1", group_size)
    if places is not None:
        rising = [*places] == sorted({*places}) and min(places, default=0) >= 0
        fits = rising and len(places) == len(prompts)
        require(fits, "places", f"{len(prompts)} rising places from 0", list(places)[:8])
    # 2. Encode, sample, decode.
    ids = encode_for(policy, prompts, options.max_new_tokens)
    sampler = engine or TransformersEngine(policy, options)
    done = sampler.generate(ids, options, group_size=group_size, seed=seed, places=places)
    name = type(sampler).__name__
    expected = len(prompts) * group_size
    require(len(done) == expected, name, f"{expected} completions", len(done), RuntimeError)
    for one in done:
        fits = one.logps.shape == (len(one.ids),)
        shape = tuple(one.logps.shape)
        require(fits, name, f"logps of shape ({len(one.ids)},)", shape, RuntimeError)
    texts = decoded(policy.tokenizer, [one.ids for one in done])
    return table_of(ids, done, texts, places)


def decoded(tokenizer: Any, completions: list[list[int]]) -> list[str]:
    """Return the texts of completions without special tokens; empty ones without a tokenizer."""
    if tokenizer is None:
        return [""] * len(completions)
    texts: list[str] = tokenizer.batch_decode(completions, skip_special_tokens=True)
    return texts


def table_of(
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Completion],
    texts: Sequence[str] = (),
    groups: Sequence[int] | None = None,
) -> Samples:
    """Build the table of what an engine returns.

    Args:
        prompts: token ids of each prompt.
        completions: as many for each prompt, those of a prompt next to each other.
        texts: of the completions.
        groups: the number of each prompt's group; None: 0, 1, 2, …
    """
    # 1. Token ids: prompt and completion of each sample, one after another.
    size = len(completions) // max(len(prompts), 1)
    pieces = [torch.zeros(0, dtype=torch.int64)]
    for n, prompt in enumerate(prompts):
        before = torch.tensor(prompt, dtype=torch.int64)
        for one in completions[n * size : (n + 1) * size]:
            pieces += [before, torch.tensor(one.ids, dtype=torch.int64)]
    lengths = torch.tensor([len(piece) for piece in pieces[1:]], dtype=torch.int64)
    segment = torch.tensor([PROMPT, COMPLETION], dtype=torch.uint8).repeat(len(completions))
    # 2. What each completion token was drawn from.
    counts = [len(one.ids) for one in completions]
    sets = [one.kept and (one.kept.ids, one.kept.offsets.diff()) for one in completions]
    support = Support.join(sets, counts, "cpu")
    mass = None
    if support is not None:
        mass = torch.full((sum(counts),), torch.nan)
        for one, own in zip(completions, mass.split(counts), strict=True):
            if one.kept is not None and one.kept.mass is not None:
                own.copy_(one.kept.mass)
    # 3. The columns.
    numbers = torch.tensor([*range(len(prompts))] if groups is None else [*groups])
    cut = [one.finish_reason != EOS for one in completions]
    versions = [one.weight_version for one in completions]
    return Samples(
        ids=torch.cat(pieces),
        segment=segment.repeat_interleave(lengths),
        cu_seqlens=pad(lengths.view(-1, 2).sum(1).cumsum(0), (1, 0)),
        group=numbers.to(torch.int64).repeat_interleave(size),
        truncated=torch.tensor(cut, dtype=torch.bool),
        weight_version=torch.tensor(versions, dtype=torch.int64),
        logps=torch.cat([torch.zeros(0), *(one.logps for one in completions)]),
        support=support,
        mass=mass,
        texts=list(texts),
    )


# ---- prompts


def check_prompts(policy: Any, prompts: Sequence[Prompt], max_new_tokens: int) -> None:
    """Raise the ValueError for prompts that `generate` would raise, before a run has begun.

    Only those that may be too long are encoded: a token has at least one byte, and a chat template
    adds less than half of what a model has room for.
    """
    room = policy.positions - max_new_tokens
    long = [p for p in prompts if 2 * len(str(p).encode()) > room]
    encode_for(policy, long, max_new_tokens)


def encode_for(policy: Any, prompts: Sequence[Prompt], max_new_tokens: int) -> list[list[int]]:
    """Call `encode_prompts`; raise a ValueError for prompts that the policy cannot take."""
    ids = encode_prompts(policy.tokenizer, prompts, policy.template_kwargs)
    rows = policy.lm.get_input_embeddings().weight.shape[0]
    for prompt, tokens in zip(prompts, ids, strict=True):
        count = len(tokens)
        most = policy.positions
        shown = repr(prompt[:60])
        expected = f"at most {most} tokens (max_position_embeddings of the model)"
        require(count <= most, "prompts", expected, f"{count} in {shown}")
        room = most - count + 1  # the last token is not fed
        expected = f"at most {room} behind a prompt of {count} (max_position_embeddings: {most})"
        require(max_new_tokens <= room, "max_new_tokens", expected, max_new_tokens)
        low, high = min(tokens), max(tokens)
        expected = f"token ids below {rows}, the rows of the model's embedding"
        came = f"{high if low >= 0 else low} in {shown}"
        require(0 <= low and high < rows, "prompts", expected, came)
    return ids


def encode_prompts(
    tokenizer: Any, prompts: Sequence[Prompt], template_kwargs: Mapping[str, Any] | None = None
) -> list[list[int]]:
    """Return the token ids of each prompt.

    Chat messages go through the tokenizer's template with the arguments `template_kwargs`. If the
    last message is the assistant's, the completion continues it. Prompts that are token ids already
    need no tokenizer.
    """
    ids: list[list[int]] = []
    for prompt in prompts:
        if tokenizer is None and not _is_encoded(prompt):
            expected = "token ids, as the model has no tokenizer (pass tokenizer=)"
            raise ValueError(f"prompts: expected {expected}, got {str(prompt)[:60]!r}")
        try:
            encoded = _encoded(tokenizer, prompt, template_kwargs)
        except Exception as error:  # a template is a program, and tokenizers raise plain Exception
            taken = "expected what the tokenizer and its chat template take"
            came = str(prompt)[:60]
            raise ValueError(f"prompts: {taken}, got {came!r}: {reason(error)}") from error
        if not encoded:  # `require` would write out every long prompt
            raise ValueError(f"prompts: expected at least one token, got {prompt!r}")
        ids.append(encoded)
    return ids


def prompt_texts(policy: Any, prompts: Sequence[Prompt]) -> list[str]:
    """Return each prompt as the text that the model reads; token ids without a tokenizer: ""."""
    tokenizer = policy.tokenizer
    return [_text_of(tokenizer, prompt, policy.template_kwargs) for prompt in prompts]


def _text_of(tokenizer: Any, prompt: Any, template_kwargs: Mapping[str, Any] | None) -> str:
    if isinstance(prompt, str):
        return prompt
    if _is_encoded(prompt):
        return "" if tokenizer is None else tokenizer.decode(prompt)
    opens = prompt[-1]["role"] != "assistant"
    return tokenizer.apply_chat_template(
        prompt,
        tokenize=False,
        add_generation_prompt=opens,
        continue_final_message=not opens,
        **(template_kwargs or {}),
    )


def _encoded(tokenizer: Any, prompt: Any, template_kwargs: Mapping[str, Any] | None) -> list[int]:
    if _is_encoded(prompt):
        return list(prompt)
    # The chat template writes the special tokens into the text.
    is_plain = isinstance(prompt, str)
    text = _text_of(tokenizer, prompt, template_kwargs)
    return tokenizer(text, add_special_tokens=is_plain)["input_ids"]


def _is_encoded(prompt: Prompt) -> bool:
    return not isinstance(prompt, str) and all(isinstance(token, int) for token in prompt)
