"""Log lines that show how a question is formatted for the model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from grpo_fast.data import FILES, Prompt
from grpo_fast.data.tokenizer import has_chat_template
from grpo_fast.rollout import encode_prompts
from grpo_fast.train.config import DataConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SHOWN_PROMPT = 1200  # maximum number of characters of a prompt in the log


def asking_lines(
    data: DataConfig, tokenizer: PreTrainedTokenizerBase, prompt: Prompt, key: str = "data.chat"
) -> list[str]:
    """Return log lines that say whether the chat template is used, and show the first prompt.

    Args:
        data: the section `data`, with `chat` resolved to true or false.
        tokenizer: tokenizer of the model.
        prompt: the first prompt. The middle of a long prompt is replaced with an ellipsis.
        key: name of the setting that turns the chat template on or off.
    """
    if data.chat or not isinstance(prompt, str):
        way = f"through the model's chat template ({key}=false sends plain text)"
    elif data.task in FILES and has_chat_template(tokenizer):
        way = f"as plain text, although the model has a chat template ({key}=true uses it)"
    else:
        way = "as plain text"
    shown = prompt_lines(tokenizer, prompt, data.template_kwargs)
    return [f"questions are asked {way}; the first prompt:", *shown]


def prompt_lines(
    tokenizer: PreTrainedTokenizerBase, prompt: Prompt, template_kwargs: Mapping[str, object]
) -> list[str]:
    """Return the lines of a prompt as the model receives it, including special tokens."""
    text = tokenizer.decode(encode_prompts(tokenizer, [prompt], template_kwargs)[0])
    half = SHOWN_PROMPT // 2
    if len(text) > SHOWN_PROMPT:
        text = f"{text[:half]} … {text[-half:]}"
    return [f"  | {line}" for line in text.split("\n")]
