"""The command `grpo-fast data`, which shows how a run reads a data set."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence

from grpo_fast.data import Example
from grpo_fast.data.answers import parse_number
from grpo_fast.data.prompts import Form
from grpo_fast.data.splits import asks_in_chat, file_splits, survey
from grpo_fast.rewards.scoring import is_expression
from grpo_fast.rollout import encode_prompts
from grpo_fast.train.config import DataConfig, ModelConfig, Section, UserPath, require
from grpo_fast.train.config.words import own_words, read_words
from grpo_fast.train.evaluation.asking import prompt_lines
from grpo_fast.train.models import loading

SHOWN = 3  # number of prompts that the command shows


class ViewSettings(Section):
    """Settings of `grpo-fast data`. All other arguments are keys of the section `data`."""

    model: UserPath | None = None
    """Model whose tokenizer and chat template format the prompts; null shows them unformatted."""


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
    # 1. Separate the key `model` from the keys of the section `data`, and read the data set.
    own, rest = own_words(ViewSettings, [word.removeprefix("data.") for word in words])
    data = read_words(DataConfig, rest, {"task": "jsonl", "path": source})
    found = survey(data)
    every = [*found.train, *found.test]
    # 2. Count the examples of each split and of each kind of answer.
    kinds = Counter(map(kind_of, every))
    columns = dict.fromkeys(name for example in every[:100] for name in example.fields)
    lines = [
        f"{source}: {len(found.train)} training and {len(found.test)} test examples",
        f"columns that rewards may name: {', '.join(columns) or 'none'}",
        "gold answers: " + ", ".join(f"{n} {name}" for name, n in kinds.most_common()),
        *found.notes,
    ]
    # 3. Show the first prompts. With model=MODEL, show them as the model receives them.
    tokenizer = None
    if own.model is not None:
        tokenizer = loading.load_tokenizer(ModelConfig(path=own.model))
        data = data.model_copy(update={"chat": asks_in_chat(data, tokenizer)})
    if data.max_prompt_tokens is not None:
        needs = "model=MODEL, whose tokenizer counts the tokens"
        require(tokenizer, "max_prompt_tokens", needs, "none")
        prompts = [Form.of(data).apply(example).prompt for example in every]
        ids = encode_prompts(tokenizer, prompts, data.template_kwargs)
        long = sum(len(each) > data.max_prompt_tokens for each in ids)
        lines.append(f"{long} prompts of more than {data.max_prompt_tokens} tokens are skipped")
    hint = "" if tokenizer else " (model=MODEL shows its tokens)"
    if data.shots_tokens is None:
        shown = [Form.of(data).apply(example) for example in found.train[:SHOWN]]
    else:
        require(tokenizer, "shots_tokens", "model=MODEL, whose tokenizer counts the tokens", "none")
        shown = list(itertools.islice(file_splits(found, data, 0, tokenizer)[0], SHOWN))
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
        return "only with tests" if "tests" in example.fields else "without an answer"
    if parse_number(example.answer) is not None:
        return "judged as numbers"
    if is_expression(example.answer):
        return "judged as expressions"
    return "judged as texts"
