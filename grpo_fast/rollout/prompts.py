"""Prompts as token ids, and refused where the tokenizer or the model cannot take them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from grpo_fast.data import reason
from grpo_fast.errors import require

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
    """`encode_prompts`, with a ValueError for prompts that the policy cannot take."""
    texts, ids = encode_prompts(policy.tokenizer, prompts)
    rows = policy.lm.get_input_embeddings().weight.shape[0]
    for text, tokens in zip(texts, ids, strict=True):
        count, most, shown = len(tokens), policy.positions, repr(text[:60])
        expected = f"at most {most} tokens (max_position_embeddings of the model)"
        require(count <= most, "prompts", expected, f"{count} in {shown}")
        room = most - count + 1  # the last token is not fed
        expected = f"at most {room} behind a prompt of {count} (max_position_embeddings: {most})"
        require(max_new_tokens <= room, "max_new_tokens", expected, max_new_tokens)
        low, high = min(tokens), max(tokens)
        expected = f"token ids below {rows}, the rows of the model's embedding"
        came = f"{high if low >= 0 else low} in {shown}"
        require(0 <= low and high < rows, "prompts", expected, came)
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
        if not encoded:  # `require` would write out every long prompt
            raise ValueError(f"prompts: expected at least one token, got {prompt!r}")
        texts.append(text)
        ids.append(encoded)
    return texts, ids
