"""Functions that encode prompts, sample completions with an engine and decode their texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.functional import pad

from grpo_fast.errors import conflict, reason, require
from grpo_fast.rollout.engine import EOS, Completion, Engine, Seed
from grpo_fast.rollout.own.engine import TransformersEngine
from grpo_fast.rollout.own.model import SampledModel
from grpo_fast.rollout.sampler import Sampling
from grpo_fast.rollout.samples import COMPLETION, PROMPT, Samples, join_supports

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Prompt = str | list[dict[str, str]] | list[int]  # text, chat messages or token ids


def generate(
    model: PreTrainedModel | PeftModel,
    prompts: Sequence[Prompt],
    options: Sampling | None = None,
    *,
    group_size: int = 1,
    seed: Seed = 0,
    tokenizer: PreTrainedTokenizerBase | None = None,
    engine: Engine | None = None,
    places: Sequence[int] | None = None,
    **sampling: Any,
) -> Samples:
    """Sample `group_size` completions of each prompt. The model processes each prompt only once.

    Args:
        model: a transformers causal LM, a peft model around one, or the trainer's `Policy`. Its
            mode, attention implementation and generation config are restored afterwards.
        prompts: texts, chat messages for the tokenizer's chat template, or token ids.
        options: the sampling options. You can pass the fields of `Sampling` as keywords instead.
        group_size: number of completions of each prompt.
        seed: an int, or a tuple such as (seed, step). The random number of a token depends only on
            this seed, the completion's index in the batch and the token's position. It does not
            depend on `batch_size`.
        tokenizer: the model's tokenizer. A `Policy` has one. A `SampledModel` without a tokenizer
            accepts only token ids, and the texts of its result are empty.
        engine: the engine that samples, with the weights that it currently has. None samples with
            `model`.
        places: index of each prompt in the global batch (over all ranks), in increasing order. None
            if `prompts` is the whole batch.
        **sampling: fields of `Sampling`, such as `max_new_tokens=64` or `top_p=0.9`.

    Returns:
        The samples with their texts. The column `group` holds the index of each sample's prompt in
        the batch.

    Raises:
        ValueError: the tokenizer or the model does not accept a prompt, a prompt leaves no room for
            `max_new_tokens`, `places` do not increase, or a sampling option is out of range.
        NonFiniteLogits: the model's logits are NaN or infinite.

    Example:
        >>> done = generate(model, prompts, group_size=8, tokenizer=tokenizer, max_new_tokens=64)
        >>> rewards = [score(text) for text in done.texts]
    """
    # 1. Check the options.
    policy = SampledModel(model, tokenizer) if isinstance(model, nn.Module) else model
    if options is not None and sampling:
        raise conflict("options", f"the keywords {sorted(sampling)}", "pass one of them")
    options = options or Sampling(**sampling)
    require(group_size >= 1, "group_size", "at least 1", group_size)
    if places is not None:
        increase = [*places] == sorted({*places}) and min(places, default=0) >= 0
        fits = increase and len(places) == len(prompts)
        require(fits, "places", f"{len(prompts)} increasing indices from 0", list(places)[:8])
    # 2. Encode the prompts and sample.
    ids = encode_for(policy, prompts, options.max_new_tokens)
    sampler = engine or TransformersEngine(policy, options)
    done = sampler.generate(ids, options, group_size=group_size, seed=seed, places=places)
    # 3. Check the result, because a custom engine may return wrong numbers or shapes.
    name = type(sampler).__name__
    expected = len(prompts) * group_size
    require(len(done) == expected, name, f"{expected} completions", len(done), RuntimeError)
    for one in done:
        fits = one.logps.shape == (len(one.ids),)
        shape = tuple(one.logps.shape)
        require(fits, name, f"logps of shape ({len(one.ids)},)", shape, RuntimeError)
    # 4. Decode the texts, without special tokens.
    texts = [""] * len(done)
    if policy.tokenizer is not None:
        each = [one.ids for one in done]
        texts = policy.tokenizer.batch_decode(each, skip_special_tokens=True)
    return table_of(ids, done, texts, places)


def table_of(
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Completion],
    texts: Sequence[str] = (),
    groups: Sequence[int] | None = None,
) -> Samples:
    """Build the table of samples from an engine's completions.

    Args:
        prompts: token ids of each prompt.
        completions: the completions, in the order of the prompts. Every prompt has the same number.
        texts: the text of each completion.
        groups: the group number of each prompt. None numbers the groups from 0.
    """
    # 1. Join the token ids of prompts and completions, sample after sample.
    size = len(completions) // max(len(prompts), 1)
    pieces = [torch.zeros(0, dtype=torch.int64)]
    for n, prompt in enumerate(prompts):
        prompt_ids = torch.tensor(prompt, dtype=torch.int64)
        for one in completions[n * size : (n + 1) * size]:
            pieces += [prompt_ids, torch.tensor(one.ids, dtype=torch.int64)]
    lengths = torch.tensor([len(piece) for piece in pieces[1:]], dtype=torch.int64)
    segment = torch.tensor([PROMPT, COMPLETION], dtype=torch.uint8).repeat(len(completions))
    # 2. Compute the other columns.
    numbers = torch.tensor([*range(len(prompts))] if groups is None else [*groups])
    truncated = [one.finish_reason != EOS for one in completions]
    versions = [one.weight_version for one in completions]
    masses = [one.mass for one in completions if one.mass is not None]
    return Samples(
        ids=torch.cat(pieces),
        segment=segment.repeat_interleave(lengths),
        cu_seqlens=pad(lengths.view(-1, 2).sum(1).cumsum(0), (1, 0)),
        group=numbers.to(torch.int64).repeat_interleave(size),
        truncated=torch.tensor(truncated, dtype=torch.bool),
        weight_version=torch.tensor(versions, dtype=torch.int64),
        logps=torch.cat([torch.zeros(0, dtype=torch.float32), *(one.logps for one in completions)]),
        support=join_supports([(one.support, len(one.ids)) for one in completions]),
        mass=torch.cat([torch.zeros(0), *masses]) if len(masses) == len(completions) else None,
        texts=list(texts),
    )


def check_prompts(policy: SampledModel, prompts: Sequence[Prompt], max_new_tokens: int) -> None:
    """Raise a ValueError, before a run starts, if `generate` would refuse one of these prompts.

    To save time, only long prompts are encoded. A prompt is long if its number of bytes exceeds
    half of the tokens that the model has left for it. A shorter prompt fits, because a token has at
    least one byte, and the chat template is assumed to add at most as many tokens again.
    """
    room = policy.positions - max_new_tokens
    long = [p for p in prompts if 2 * len(str(p).encode()) > room]
    encode_for(policy, long, max_new_tokens)


def encode_for(
    policy: SampledModel, prompts: Sequence[Prompt], max_new_tokens: int
) -> list[list[int]]:
    """Return the token ids of each prompt, after checking that the policy's model accepts them.

    Raises:
        ValueError: a prompt is too long for the model or has ids that are not in the vocabulary.
    """
    ids = encode_prompts(policy.tokenizer, prompts, policy.template_kwargs)
    rows = policy.lm.get_input_embeddings().weight.shape[0]
    for prompt, tokens in zip(prompts, ids, strict=True):
        count = len(tokens)
        most = policy.positions
        shown = repr(prompt[:60])
        expected = f"at most {most} tokens (max_position_embeddings of the model)"
        require(count <= most, "prompts", expected, f"{count} in {shown}")
        room = most - count + 1  # the last sampled token is not fed to the model
        expected = f"at most {room} after a prompt of {count} (max_position_embeddings: {most})"
        require(max_new_tokens <= room, "max_new_tokens", expected, max_new_tokens)
        low, high = min(tokens), max(tokens)
        expected = f"token ids below {rows}, the rows of the model's embedding"
        came = f"{high if low >= 0 else low} in {shown}"
        require(0 <= low and high < rows, "prompts", expected, came)
    return ids


def encode_prompts(
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    template_kwargs: Mapping[str, object] | None = None,
) -> list[list[int]]:
    """Return the token ids of each prompt.

    If the last chat message has the role "assistant", the completion continues this message.

    Args:
        tokenizer: the model's tokenizer. If None, only prompts of token ids are accepted.
        prompts: texts, chat messages or token ids.
        template_kwargs: further arguments of the tokenizer's chat template.

    Raises:
        ValueError: the tokenizer or its chat template refuses a prompt, or a prompt has no token.
    """
    ids: list[list[int]] = []
    for prompt in prompts:
        if tokenizer is None and not _is_encoded(prompt):
            expected = "token ids, because the model has no tokenizer (pass tokenizer=)"
            raise ValueError(f"prompts: expected {expected}, got {str(prompt)[:60]!r}")
        try:
            if _is_encoded(prompt):
                encoded = [*prompt]
            else:
                # A chat template already writes special tokens such as BOS. A text may begin with
                # BOS, too.
                text = _text_of(tokenizer, prompt, template_kwargs)
                bos = tokenizer.bos_token or text
                is_plain = isinstance(prompt, str) and (bos == text or not text.startswith(bos))
                encoded = tokenizer(text, add_special_tokens=is_plain)["input_ids"]
        except Exception as error:  # a template is a program, and tokenizers raise plain Exception
            expected = "expected a prompt that the tokenizer and its chat template accept"
            came = str(prompt)[:60]
            raise ValueError(f"prompts: {expected}, got {came!r}: {reason(error)}") from error
        if not encoded:  # `require` would format even valid prompts
            raise ValueError(f"prompts: expected at least one token, got {prompt!r}")
        ids.append(encoded)
    return ids


def prompt_texts(policy: SampledModel, prompts: Sequence[Prompt]) -> list[str]:
    """Return the text of each prompt. Chat messages are formatted by the chat template.

    Without a tokenizer, the text of a prompt of token ids is "".
    """
    tokenizer = policy.tokenizer
    return [_text_of(tokenizer, prompt, policy.template_kwargs) for prompt in prompts]


def _text_of(
    tokenizer: PreTrainedTokenizerBase, prompt: Any, template_kwargs: Mapping[str, object] | None
) -> str:
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


def _is_encoded(prompt: Prompt) -> bool:
    return not isinstance(prompt, str) and all(isinstance(token, int) for token in prompt)
