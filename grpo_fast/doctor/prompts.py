"""What an engine may have made of a prompt before it sampled behind it.

A reading is token ids in place of those that were sent. Padding that is not masked is one, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from grpo_fast.data import Prompt

AS_SENT, UNPADDED = "as sent", "none"
BOS_TWICE, NO_BOS, AGAIN = "BOS twice", "no BOS", "tokenized again"
TEMPLATED, UNTEMPLATED = "chat template on top", "no chat template"
UNPROMPTED = "no generation prompt"
LEFT, RIGHT = "left", "right"

Ids = list[list[int]]


def readings(tokenizer: Any, prompts: Sequence[Prompt], ids: Ids) -> dict[str, Ids]:
    """Name → every prompt's token ids so read: what was sent first, and no two alike."""
    found = {AS_SENT: [list(tokens) for tokens in ids]}
    bos = getattr(tokenizer, "bos_token_id", None)
    ways: dict[str, Callable[[Prompt, list[int]], list[int]]] = {
        BOS_TWICE: lambda _, tokens: tokens if bos is None else [bos, *tokens],
        NO_BOS: lambda _, tokens: tokens[1:] if tokens[0] == bos else tokens,
        AGAIN: lambda _, tokens: tokenizer(tokenizer.decode(tokens))["input_ids"],
        TEMPLATED: lambda prompt, tokens: _templated(tokenizer, prompt, tokens),
        UNTEMPLATED: lambda prompt, tokens: _plain(tokenizer, prompt, tokens),
        UNPROMPTED: lambda prompt, tokens: _unprompted(tokenizer, prompt, tokens),
    }
    for name, read in ways.items():
        try:
            other = [read(prompt, t) for prompt, t in zip(prompts, ids, strict=True)]
        except Exception:  # a template is a program, and tokenizers raise plain Exception
            continue  # then no engine can have read the prompts so
        if all(other) and other not in found.values():
            found[name] = other
    return found


def padded(ids: Ids, side: str, pad: int) -> Ids:
    """All as long as the longest, with padding that is read like any other token.

    side: LEFT, RIGHT, or UNPADDED for the ids as they are.
    """
    if side == UNPADDED:
        return ids
    longest = max(map(len, ids))
    gaps = [[pad] * (longest - len(tokens)) for tokens in ids]
    pairs = zip(ids, gaps, strict=True)
    return [gap + tokens if side == LEFT else tokens + gap for tokens, gap in pairs]


def _templated(tokenizer: Any, prompt: Prompt, tokens: list[int]) -> list[int]:
    if not isinstance(prompt, str):
        return tokens
    return _tokens(tokenizer, [{"role": "user", "content": prompt}])


def _unprompted(tokenizer: Any, prompt: Prompt, tokens: list[int]) -> list[int]:
    if isinstance(prompt, str):
        return tokens
    return _tokens(tokenizer, prompt, add_generation_prompt=False)


def _plain(tokenizer: Any, prompt: Prompt, tokens: list[int]) -> list[int]:
    if isinstance(prompt, str):
        return tokens
    ids: list[int] = tokenizer("\n".join(part["content"] for part in prompt))["input_ids"]
    return ids


def _tokens(tokenizer: Any, messages: Any, add_generation_prompt: bool = True) -> list[int]:
    text = tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=add_generation_prompt
    )
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids
