"""Lines that say how questions are asked: in the log of a run, and in an evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from grpo_fast.data import FILES, TRACES, Prompt
from grpo_fast.data.tokenizer import has_chat_template
from grpo_fast.rollout import encode_prompts
from grpo_fast.train.config import DataConfig

SHOWN_PROMPT = 1200  # characters of a prompt


def asking_lines(
    data: DataConfig, tokenizer: Any, prompt: Prompt, key: str = "data.chat"
) -> list[str]:
    """Say how the questions are asked, and show a prompt with its special tokens.

    Args:
        data: with `chat` as it is used.
        key: the setting that changes it.
        prompt: shown at most SHOWN_PROMPT characters long; its middle is left out.
    """
    if data.task == TRACES:
        return []
    if data.chat or not isinstance(prompt, str):
        hint = f"{key}=false sends questions of plain text as they are"
        way = f"through the model's chat template ({hint})"
    elif data.task in FILES and has_chat_template(tokenizer):
        way = f"as plain text, although the model has a chat template ({key}=true uses it)"
    else:
        way = "as plain text"
    shown = prompt_lines(tokenizer, prompt, data.template_kwargs)
    return [f"questions are asked {way}; the first prompt:", *shown]


def prompt_lines(tokenizer: Any, prompt: Prompt, template_kwargs: Mapping[str, Any]) -> list[str]:
    """Return a prompt as the model receives it, with its special tokens."""
    text = tokenizer.decode(encode_prompts(tokenizer, [prompt], template_kwargs)[0])
    half = SHOWN_PROMPT // 2
    if len(text) > SHOWN_PROMPT:
        text = f"{text[:half]} … {text[-half:]}"
    return [f"  | {line}" for line in text.split("\n")]
