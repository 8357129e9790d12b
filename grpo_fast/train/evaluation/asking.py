"""Lines that say how questions are asked: in the log of a run, and in an evaluation."""

from __future__ import annotations

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
        way = f"through the model's chat template ({key}=false sends plain text)"
    elif data.task in FILES and has_chat_template(tokenizer):
        way = f"as plain text, although the model has a chat template ({key}=true uses it)"
    else:
        way = "as plain text"
    text = tokenizer.decode(encode_prompts(tokenizer, [prompt])[0])
    half = SHOWN_PROMPT // 2
    if len(text) > SHOWN_PROMPT:
        text = f"{text[:half]} … {text[-half:]}"
    return [
        f"questions are asked {way}; the first prompt:",
        *(f"  | {x}" for x in text.split("\n")),
    ]
