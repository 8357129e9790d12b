"""Prompts as token ids, and refused where the tokenizer or the model cannot take them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from grpo_fast.data import reason

Prompt = str | list[dict[str, str]] | list[int]  # text, chat messages or token ids


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
        if min(tokens) < 0 or max(tokens) >= rows:
            raise ValueError(
                f"prompts: expected token ids below {rows}, the rows of the model's embedding, "
                f"got {max(tokens) if min(tokens) >= 0 else min(tokens)} in {text[:60]!r}"
            )
    return texts, ids


def encode_prompts(tokenizer: Any, prompts: Sequence[Prompt]) -> tuple[list[str], list[list[int]]]:
    """Text and token ids of each prompt; chat messages go through the template."""
    texts: list[str] = []
    ids: list[list[int]] = []
    for prompt in prompts:
        plain = isinstance(prompt, str)
        text: Any = prompt
        is_encoded = not plain and all(isinstance(token, int) for token in text)
        try:
            if is_encoded:
                encoded, text = [*text], tokenizer.decode(text)
            else:
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
