"""Examples from a jsonl file, a folder of two, or the hub: GSM8K and anything with a prompt and an answer."""

from __future__ import annotations

import json
import os
import random
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from grpo_fast.data.example import DatasetError, Example, Prompt
from grpo_fast.data.gsm8k import gold_answer, strip_calculator
from grpo_fast.data.shots import ShotPrompts

SPLIT_SEED = "grpo_fast held-out lines"
PROMPT_FIELDS = ("prompt", "question", "messages")
PROMPT_TEMPLATES = {
    "plain": "Question: {question}\nAnswer:",
    "hash": "{question}\nThink step by step, then end with the final answer as: #### <number>\n",
    "answer_tag": "{question}\nThink step by step, then end with: <answer>number</answer>\n",
}


class Row(NamedTuple):
    """One record and where it came from, for error messages."""

    where: str
    fields: Any


def load_file_examples(
    data: Any, *, gsm8k: bool, split: str, seed: int, count_tokens: Callable[[str], int] | None = None
) -> Sequence[Example]:
    """Train or test examples of a local file, folder or hub dataset; see `grpo_fast.data.load_examples`."""
    template = resolve_template(getattr(data, "prompt_template", None))
    system, chat = getattr(data, "system_prompt", None), bool(getattr(data, "chat", False))
    shots, budget = int(getattr(data, "shots", 0) or 0), getattr(data, "shots_tokens", None)
    n_train, n_test = getattr(data, "n_train", None), getattr(data, "n_test", None)
    train, test = _both_splits(data, gsm8k, n_test, need_train=split == "train" or shots > 0 or budget is not None)
    if shots > len(train):
        raise DatasetError(f"data.shots: expected at most the {len(train)} training examples, got {shots}")
    if not test:
        raise DatasetError(f"data: expected at least one test example in {_source(data)}, got none")
    if split == "test":
        chosen = test[:n_test]
    else:
        chosen = train[shots:][:n_train]
        if not chosen:
            after = f" after data.shots = {shots}" if shots else ""
            raise DatasetError(
                f"data: expected a training example in {_source(data)} whose prompt is not a "
                f"test prompt as well, got none{after}"
            )
        random.Random(f"{seed}/order").shuffle(chosen)

    def dress(example: Example, prefix: str) -> Example:
        return _dress(example, template, prefix, system, chat)

    if budget is None:
        prefix = "".join(_shot(e, template) for e in train[:shots])
        return [dress(e, prefix) for e in chosen]
    if count_tokens is None:
        raise DatasetError("count_tokens: data.shots_tokens needs a function that counts tokens, got None")
    return ShotPrompts(
        chosen, [e for e in train if isinstance(e.prompt, str)], budget=budget, count_tokens=count_tokens,
        shot=lambda e: _shot(e, template), dress=dress, seed=seed if split == "train" else "test",
    )  # fmt: skip


def _shot(example: Example, template: str) -> str:
    """A worked example: the prompt as the question has it, and its solution."""
    return f"{fill(template, str(example.prompt))} {example.solution or example.answer}\n\n"


def read_examples(
    path: str | Path,
    *,
    gsm8k: bool = False,
    prompt_template: str | None = None,
    system: str | None = None,
    chat: bool = False,
) -> list[Example]:
    """Every line of one jsonl file, in its order, with the prompt template applied."""
    template = resolve_template(prompt_template)
    return [_dress(e, template, "", system, chat) for e in _parse_all(_read_jsonl(Path(path)), gsm8k)]


def resolve_template(template: str | None) -> str:
    """A template by its name in PROMPT_TEMPLATES, or a text with `{question}`; None leaves the question as it is."""
    if template is None:
        return "{question}"
    text = PROMPT_TEMPLATES.get(template, template)
    if "{question}" not in text:
        names = ", ".join(PROMPT_TEMPLATES)
        raise DatasetError(f"prompt_template: expected {{question}} in the text, or one of {names}; got {template!r}")
    return text


def fill(template: str, question: str) -> str:
    """The template with the question in it; braces in either are left alone."""
    return template.replace("{question}", question)


def parse_row(row: Row, *, gsm8k: bool) -> Example:
    """One record as an example. Raises DatasetError with the place and the reason."""
    fields = row.fields
    if not isinstance(fields, dict):
        raise DatasetError(f"{row.where}: expected a JSON object, got {type(fields).__name__}")
    name = next((n for n in PROMPT_FIELDS if n in fields), None)
    if name is None:
        found = ", ".join(map(repr, fields)) or "none"
        raise DatasetError(f"{row.where}: expected a field 'prompt' or 'question', found {found}")
    prompt = _checked_prompt(fields[name], f"{row.where}: field {name!r}")
    answer = fields.get("answer")
    if isinstance(answer, (int, float)) and not isinstance(answer, bool):
        answer = str(answer)
    if not isinstance(answer, str) or not answer.strip():
        raise DatasetError(f"{row.where}: expected a non-empty text in field 'answer', got {answer!r}")
    solution = fields.get("solution")
    if solution is not None and not isinstance(solution, str):
        raise DatasetError(f"{row.where}: expected a text in field 'solution', got {type(solution).__name__}")
    _check_unicode([prompt, answer, solution], row.where)
    if gsm8k or "####" in answer:
        try:
            gold = gold_answer(answer)
        except ValueError as error:
            raise DatasetError(f"{row.where}: {error}") from None
        return Example(prompt, gold, solution or strip_calculator(answer))
    return Example(prompt, answer, solution)


def _both_splits(
    data: Any, gsm8k: bool, n_test: int | None, *, need_train: bool
) -> tuple[list[Example], list[Example]]:
    path, name = getattr(data, "path", None), getattr(data, "name", None)
    if path:
        train_file, test_file = _locate(Path(path))
        if test_file is None:
            return _hold_out(_parse_all(_read_jsonl(train_file), gsm8k), n_test, train_file)
        test = _parse_all(_read_jsonl(test_file), gsm8k)
        train = _parse_all(_read_jsonl(train_file), gsm8k) if need_train else []
    elif name:
        test = _parse_all(_read_hub(name, "test"), gsm8k)
        train = _parse_all(_read_hub(name, "train"), gsm8k) if need_train else []
    else:
        raise DatasetError("data: expected data.path (a .jsonl file or a folder) or data.name (a hub id), got neither")
    return _without(train, test), test


def _source(data: Any) -> str:
    return str(getattr(data, "path", None) or getattr(data, "name", None))


def _locate(path: Path) -> tuple[Path, Path | None]:
    """The training file and, where there is one, the test file that belongs to it."""
    if os.path.isdir(path):  # Path's own methods raise where a folder may not be looked into
        path = path / "train.jsonl"
    if not os.path.isfile(path):
        raise DatasetError(f"data.path: expected a .jsonl file or a folder with train.jsonl, found nothing at {path}")
    sibling = path.with_name("test.jsonl")
    return path, sibling if path.name == "train.jsonl" and os.path.isfile(sibling) else None


def _hold_out(examples: list[Example], n_test: int | None, file: Path) -> tuple[list[Example], list[Example]]:
    """Split one file: the same lines are held out whatever the run's seed is."""
    count = max(1, len(examples) // 10) if n_test is None else int(n_test)
    if count >= len(examples):
        raise DatasetError(f"data.n_test: expected fewer than the {len(examples)} lines of {file}, got {count}")
    order = list(range(len(examples)))
    random.Random(SPLIT_SEED).shuffle(order)
    held_out = set(order[:count])
    test = [e for i, e in enumerate(examples) if i in held_out]
    return _without([e for i, e in enumerate(examples) if i not in held_out], test), test


def _without(train: list[Example], test: list[Example]) -> list[Example]:
    """Training examples whose prompt is not a test prompt."""
    known = {repr(e.prompt) for e in test}
    return [e for e in train if repr(e.prompt) not in known]


def _parse_all(rows: Iterator[Row], gsm8k: bool) -> list[Example]:
    return [parse_row(row, gsm8k=gsm8k) for row in rows]


def _read_jsonl(path: Path) -> Iterator[Row]:
    if not os.path.isfile(path):
        raise DatasetError(f"data.path: expected a .jsonl file, found nothing at {path}")
    count = 0
    try:
        with path.open("rb") as file:
            for number, raw in enumerate(file, start=1):
                if number == 1:
                    raw = raw.removeprefix(BOM_UTF8)
                if raw.strip():
                    count += 1
                    yield _row(f"{path}:{number}", raw)
    except OSError as error:
        raise DatasetError(f"data.path: expected a readable .jsonl file, got {error}") from None
    if count == 0:
        raise DatasetError(f"{path}: expected at least one line, the file is empty")


def _row(where: str, raw: bytes) -> Row:
    try:
        return Row(where, json.loads(raw.decode()))
    except UnicodeDecodeError as error:
        at = f"{error.reason} at byte {error.start}"
        raise DatasetError(f"{where}: not UTF-8 text ({at})") from None
    except (ValueError, RecursionError) as error:  # JSON's own, or a number of 5000 digits
        raise DatasetError(f"{where}: not a JSON object ({error})") from None


def _read_hub(name: str, split: str) -> Iterator[Row]:
    """Rows of a hub dataset, `owner/name` or `owner/name:config`."""
    try:
        import datasets
    except ImportError:
        raise DatasetError(
            f"data.name: loading {name!r} from the hub needs the package `datasets` (pip install 'grpo_fast[train]'); "
            "or give data.path a local jsonl"
        ) from None
    repository, _, config = name.partition(":")
    config = config or ("main" if repository in ("openai/gsm8k", "gsm8k") else "")
    try:
        loaded = datasets.load_dataset(repository, config or None, split=split)
    except Exception as error:  # offline, no such dataset, no such split: one sentence instead of a long traceback
        raise DatasetError(f"data.name: could not load split {split!r} of {name!r} from the hub: {error}") from error
    for index, fields in enumerate(loaded):
        yield Row(f"{name}[{split}]:{index + 1}", dict(fields))


def _checked_prompt(value: Any, where: str) -> Prompt:
    if isinstance(value, str):
        if not value.strip():
            raise DatasetError(f"{where}: expected a non-empty text")
        return value
    if not isinstance(value, list) or not value:
        raise DatasetError(f"{where}: expected a text or a list of chat messages, got {type(value).__name__}")
    for message in value:
        ok = isinstance(message, dict) and isinstance(message.get("role"), str)
        if not ok or not isinstance(message.get("content"), str):
            raise DatasetError(f"{where}: expected messages with the texts 'role' and 'content', got {message!r}")
    return value


def _check_unicode(value: Any, where: str) -> None:
    r"""Raise DatasetError for half a character: JSON may hold "\ud800" alone, no tokenizer may."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            found = f"the lone surrogate {value[error.start]!r} at character {error.start}"
            raise DatasetError(f"{where}: expected Unicode, got {found}") from None
    elif isinstance(value, (list, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            _check_unicode(item, where)


def _dress(example: Example, template: str, prefix: str = "", system: str | None = None, chat: bool = False) -> Example:
    if not isinstance(example.prompt, str):
        return example  # chat messages are complete as they are
    text = prefix + fill(template, example.prompt)
    if system is None and not chat:
        return example._replace(prompt=text)
    messages = [] if system is None else [{"role": "system", "content": system}]
    return example._replace(prompt=[*messages, {"role": "user", "content": text}])
