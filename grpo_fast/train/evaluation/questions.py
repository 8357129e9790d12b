"""The command `grpo-fast data`, and the log lines that say how a run asks its questions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from grpo_fast.data import FILES, Example, Prompt
from grpo_fast.data.answers import parse_number
from grpo_fast.data.prompts import Form
from grpo_fast.data.records import TESTS, find
from grpo_fast.data.splits import Splits
from grpo_fast.data.tokenizer import has_chat_template
from grpo_fast.errors import require
from grpo_fast.rewards.columns import tests_error
from grpo_fast.rewards.scoring import is_expression
from grpo_fast.rollout import encode_prompts
from grpo_fast.train.config import DataConfig, ModelConfig, UserPath
from grpo_fast.train.config.words import read_words
from grpo_fast.train.models import loading

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SHOWN = 3  # number of prompts that the command shows
SHOWN_PROMPT = 1200  # maximum number of characters of a prompt in the log
REFUSED = "with tests that code_tests refuses"


class ViewSettings(DataConfig):
    """Settings of `grpo-fast data`, in addition to the keys of the section `data`.

    Attributes:
        model: Model whose tokenizer and chat template format the prompts; null shows them
            unformatted.
    """

    model: UserPath | None = None


def data_lines(source: str, words: Sequence[str]) -> list[str]:
    """Return output lines that describe a data set.

    The lines report how many examples each split has, why rows were skipped, and the first prompts.

    Args:
        source: a file, a folder, or a hub id.
        words: key=value arguments: the key `model`, and keys of the section `data`, with or without
            the prefix `data.`.

    Raises:
        ValueError: a setting, the source or a row of the data is invalid.
    """
    # 1. Read the data set.
    words = [word.removeprefix("data.") for word in words]
    data = read_words(ViewSettings, words, {"task": "jsonl", "path": source})
    needs = "model=MODEL, whose tokenizer counts the tokens"
    require(data.model or data.shots_tokens is None, "shots_tokens", needs, "none")
    splits = Splits(data, 0)
    train, test = splits.questions
    # 2. Count the examples of each split and of each kind of answer.
    every = [*train, *test]
    kinds = [kind_of(example) for example in every]
    columns = dict.fromkeys(name for example in train[:100] for name in example.fields)
    lines = [
        f"{source}: {len(train)} training and {len(test)} test examples",
        f"columns that rewards may name: {', '.join(columns) or 'none'}",
        "gold answers: " + ", ".join(f"{n} {x}" for x, n in Counter(kinds).most_common()),
    ]
    if REFUSED in kinds:
        first = every[kinds.index(REFUSED)]
        remedy = "data.drop_unusable=true skips such rows"
        lines.append(f"the first tests that code_tests refuses: {tests_error(first)}; {remedy}")
    # 3. Show the first prompts. With model=MODEL, show them as the model receives them.
    tokenizer = None
    hint = " (model=MODEL shows its tokens)"
    if data.model is not None:
        tokenizer = loading.load_tokenizer(ModelConfig(path=data.model))
        splits = splits.for_tokenizer(tokenizer)
        hint = ""
    form = Form.of(splits.data)
    shown = [form.apply(example) for example in train[:SHOWN]]
    if data.shots_tokens is not None:
        shown = list(splits.train[:SHOWN])
    for number, example in enumerate(shown, 1):
        prompt = example.prompt
        lines.append(f"prompt {number}{hint}:")
        if tokenizer is not None:
            lines += prompt_lines(tokenizer, prompt, data.template_kwargs)
        elif isinstance(prompt, str):
            lines += [f"  | {line}" for line in prompt.split("\n")]
        else:
            lines += [f"  | {message['role']}: {message['content']!r}" for message in prompt]
        lines.append(f"  gold answer: {example.answer!r} ({kind_of(example)})")
    return lines


def kind_of(example: Example) -> str:
    """Describe how a completion is compared with the gold answer of an example."""
    if example.answer is None and example.label is not None:
        return "as lists or mappings, for your own reward"
    if example.answer is None:
        if find(example.fields, TESTS) is None:
            return "without an answer"
        return REFUSED if tests_error(example) else "judged by code_tests"
    if parse_number(example.answer) is not None:
        return "judged as numbers"
    if is_expression(example.answer):
        return "judged as expressions"
    return "judged as texts"


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
