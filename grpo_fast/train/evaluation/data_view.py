"""`grpo-fast data`: what a data set holds, before anybody spends a GPU hour on it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from grpo_fast.data import FILES, Example
from grpo_fast.data.answers import parse_number
from grpo_fast.data.files import survey
from grpo_fast.data.prompts import Form
from grpo_fast.data.readers import is_local
from grpo_fast.data.splits import asks_in_chat
from grpo_fast.rewards.scoring import is_expression
from grpo_fast.train.config import DataConfig, ModelConfig, Section, UserPath, require
from grpo_fast.train.config.words import own_words, read_words
from grpo_fast.train.evaluation.asking import prompt_lines
from grpo_fast.train.models import loading

SHOWN = 3  # prompts


class ViewSettings(Section):
    """The settings of `grpo-fast data` itself; every other `key=value` is the data's."""

    model: UserPath | None = None
    """The model whose tokenizer and chat template show the prompts."""


def data_lines(source: str, words: Sequence[str]) -> list[str]:
    """Return lines on a data set: counts, what is skipped and why, and the first prompts.

    Args:
        source: a file, a folder, or a hub id.
        words: model=MODEL, and the keys of the section `data`.

    Raises:
        ValueError: a setting, a source or a row that cannot be used.
    """
    own, rest = own_words(ViewSettings, words)
    kind = "path" if is_local(source) else "name"
    data = read_words(DataConfig, rest, {"task": "jsonl", kind: source})
    require(data.task in FILES, "task", f"one of {', '.join(FILES)}", data.task)
    found = survey(data)
    every = [*found.train, *found.test]
    kinds = Counter(map(kind_of, every))
    columns = dict.fromkeys(name for e in every[:100] for name in e.fields)
    lines = [
        f"{source}: {len(found.train)} training and {len(found.test)} test examples",
        f"columns that rewards may name: {', '.join(columns) or 'none'}",
        "gold answers: " + ", ".join(f"{n} {name}" for name, n in kinds.most_common()),
        *found.notes,
    ]
    tokenizer = None
    if own.model is not None:
        tokenizer = loading.load_tokenizer(ModelConfig(path=own.model))
        data = data.model_copy(update={"chat": asks_in_chat(data, tokenizer)})
    form = Form.of(data.prompt_template, data.system_prompt, bool(data.chat))
    for number, example in enumerate(found.train[:SHOWN], 1):
        lines.append(f"prompt {number}{'' if tokenizer else ' (model=MODEL shows its tokens)'}:")
        lines += _shown(form.apply(example), tokenizer, data)
        lines.append(f"  gold answer: {example.answer!r} ({kind_of(example)})")
    return lines


def kind_of(example: Example) -> str:
    """Return how the gold answer of an example is judged."""
    if example.answer is None:
        return "without an answer"
    if parse_number(example.answer) is not None:
        return "judged as numbers"
    return "judged as " + ("expressions" if is_expression(example.answer) else "texts")


def _shown(example: Example, tokenizer: Any, data: DataConfig) -> list[str]:
    if tokenizer is not None:
        return prompt_lines(tokenizer, example.prompt, data.template_kwargs)
    if isinstance(example.prompt, str):
        return [f"  | {line}" for line in example.prompt.split("\n")]
    return [f"  | {message['role']}: {message['content']!r}" for message in example.prompt]
