"""Readings of the prompts: token ids that an engine may have read in place of those sent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from grpo_fast.data import Prompt

AS_SENT, REORDERED = "as sent", "another prompt's answers"
AGAIN = "tokenized again"
TEMPLATED, UNTEMPLATED = "chat template on top", "no chat template"
UNPROMPTED, SYSTEM = "no generation prompt", "a system prompt of its own"
TEMPLATES = (TEMPLATED, UNTEMPLATED, UNPROMPTED, SYSTEM)
LEFT, RIGHT = "padding on the left", "padding on the right"
HELPFUL = {"role": "system", "content": "You are a helpful assistant."}  # of many templates
BEHIND = ("\n", " ", "\n\n")  # what a text ends with before it is tokenized

Ids = list[list[int]]
Way = Callable[[Prompt, list[int]], list[int]]


def readings(tokenizer: Any, prompts: Sequence[Prompt], ids: Ids, pad: int) -> dict[str, Ids]:
    """Name of a reading → the token ids of each prompt. The first is as sent, no two are equal."""
    read_as = {AS_SENT: [list(tokens) for tokens in ids]}
    ways: dict[str, Way] = {}
    for name in ("bos", "eos", "pad"):
        token = getattr(tokenizer, f"{name}_token_id", None)
        ways[f"{name} in front"] = _beside([token], [])
        ways[f"{name} at its end"] = _beside([], [token])
    for text in BEHIND:
        more = tokenizer(text, add_special_tokens=False)["input_ids"]
        ways[f"{text!r} at its end"] = _beside([], more)
    longest = max(map(len, ids))
    ways |= {
        "without its first token": lambda _, t: t[1:],
        "without its last token": lambda _, t: t[:-1],
        AGAIN: lambda _, t: tokenizer(tokenizer.decode(t))["input_ids"],
        TEMPLATED: lambda p, t: _chat(tokenizer, _asked(p)) if isinstance(p, str) else t,
        SYSTEM: lambda p, _: _chat(tokenizer, [HELPFUL, *_asked(p)]),
        UNTEMPLATED: lambda p, t: t if isinstance(p, str) else _plain(tokenizer, p),
        UNPROMPTED: lambda p, t: t if isinstance(p, str) else _chat(tokenizer, p, opens=False),
        LEFT: lambda _, t: [pad] * (longest - len(t)) + t,
        RIGHT: lambda _, t: t + [pad] * (longest - len(t)),
    }
    for name, read in ways.items():
        try:
            other = [read(prompt, list(t)) for prompt, t in zip(prompts, ids, strict=True)]
        except Exception:  # a template is a program, and tokenizers raise plain Exception
            continue  # then no engine can have read the prompts so
        is_whole = all(tokens and None not in tokens for tokens in other)
        if is_whole and other not in read_as.values():
            read_as[name] = other
    return read_as


def _asked(prompt: Prompt) -> list[dict[str, str]]:
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)


def _beside(front: list[Any], behind: list[Any]) -> Way:
    return lambda _, tokens: [*front, *tokens, *behind]


def _plain(tokenizer: Any, messages: Any) -> list[int]:
    return tokenizer("\n".join(part["content"] for part in messages))["input_ids"]


def _chat(tokenizer: Any, messages: Any, *, opens: bool = True) -> list[int]:
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=opens)
    return tokenizer(text, add_special_tokens=False)["input_ids"]
