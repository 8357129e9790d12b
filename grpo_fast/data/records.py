"""Conversion of a row of a data set to an example. Common column names are recognized."""

from __future__ import annotations

import contextlib
import json
import math
import re
import reprlib
from collections.abc import Iterable, Mapping
from typing import Any

from grpo_fast.data.answers import (
    HASHES,
    MAX_DIGITS,
    Number,
    marked_content,
    parse_number,
    read_gold,
)
from grpo_fast.data.example import Example, Prompt
from grpo_fast.errors import require

PROMPTS = ("prompt", "question", "problem", "query", "messages")
VERLS_ANSWER = "reward_model.ground_truth"
# Columns that may contain the gold answer. If a row has none of them, the answer is extracted from
# the solution.
ANSWERS = ("answer", "ground_truth", VERLS_ANSWER)
_CALCULATOR = re.compile(r"<<[^<>\n]*>>")
# Matches one half of a UTF-16 surrogate pair. JSON may contain a single half, but tokenizers reject
# it.
_SURROGATE = re.compile("[\ud800-\udfff]")


def parse_record(
    where: str, fields: Any, gsm8k: bool, columns: Mapping[str, str] | None = None
) -> Example:
    """Convert a row to an example. The `fields` of the example are all columns except `prompt`.

    Args:
        where: the row's location, for error messages.
        fields: the row's columns.
        gsm8k: if True, every answer must end with `#### <number>`.
        columns: names of the columns for `prompt`, `answer` and `solution`. A dot selects a key
            inside a column, as in "reward_model.ground_truth".

    Raises:
        ValueError: the row has no prompt, or a value of the wrong type.
    """
    # 1. Find the prompt, the answer and the solution.
    require(isinstance(fields, dict), where, "a JSON object", type(fields).__name__)
    given = dict(columns or {})
    listed = ", ".join(map(repr, fields)) or "none"
    for role in ("prompt", "answer"):
        if role in given and _value(fields, given[role]) is None:
            raise ValueError(f"{where}: expected a field {given[role]!r} (found {listed})")
    name = given.get("prompt") or _find(fields, PROMPTS)
    if name is None:
        expected = f"expected a field 'prompt' or 'question', found {listed}"
        raise ValueError(f"{where}: {expected}{_advice(fields)}")
    prompt = _prompt_of(_value(fields, name), f"{where}: field {name!r}")
    answer_name = given.get("answer") or _find(fields, [n for n in ANSWERS if n != name])
    answer = None if answer_name is None else _value(fields, answer_name)
    solution = _value(fields, given.get("solution", "solution"))
    if answer is None and isinstance(solution, str) and marked_content(solution) is not None:
        answer = solution
    # 2. Rows for supervised training end with a message of the assistant. Use this message as the
    # answer. The column `prompt` is an exception: its final assistant message may be the beginning
    # of the completion.
    if not isinstance(prompt, str) and prompt[-1]["role"] == "assistant":
        if name == "messages" or (answer is None and name != "prompt"):
            reply = prompt.pop()["content"]
            require(prompt, f"{where}: field {name!r}", "a message before the assistant's", "none")
            answer = reply if answer is None else answer
            solution = solution or reply
    # 3. Convert the answer to text.
    label = answer
    if isinstance(answer, list) and len(answer) == 1:
        answer = answer[0]
    if isinstance(answer, (dict, list)) and answer_name == VERLS_ANSWER and not gsm8k:
        answer = None  # a reward function for verl reads `label` instead
    if type(answer) is int or (isinstance(answer, float) and math.isfinite(answer)):
        answer = str(answer)
    is_text = isinstance(answer, str) and answer.strip()
    fits = is_text or (answer is None and not gsm8k)
    require(fits, where, f"a non-empty text in field {answer_name or 'answer'!r}", repr(answer))
    fits = solution is None or isinstance(solution, str)
    require(fits, where, "a text in field 'solution'", type(solution).__name__)
    lone = _SURROGATE.search(json.dumps([prompt, answer, solution], ensure_ascii=False))
    require(not lone, where, "Unicode", lone and f"the lone surrogate {lone[0]!r}")
    # 4. If the answer column contains a full solution, extract the gold answer from it.
    others = {key: value for key, value in fields.items() if key != "prompt"}
    if answer is None:
        return Example(prompt, None, solution, others, label)
    try:
        gold = gold_answer(answer) if gsm8k else read_gold(answer)
    except ValueError as error:
        raise ValueError(f"{where}: {error}; data.task=jsonl reads other answers") from None
    worked = strip_calculator(answer) if gold != answer else None
    return Example(prompt, gold, solution or worked, others, label)


def gold_answer(solution: str) -> str:
    """Return the number after the last `####` of a GSM8K solution, without commas.

    Raises:
        ValueError: the text has no such number.

    Example:
        >>> gold_answer("It costs 1,080. #### 1,080")
        '1080'
    """
    content = marked_content(solution, (HASHES,))
    marked = content is not None
    require(marked, "answer", "'#### <number>' at the end of the answer", repr(solution[-60:]))
    number = parse_number(content)
    expected = f"a number after '####', of at most {MAX_DIGITS} digits"
    require(number is not None, "answer", expected, repr(content[:60]))
    return _plain(number)


def strip_calculator(solution: str) -> str:
    """Return a GSM8K solution without calculator annotations such as `<<48/2=24>>`."""
    return _CALCULATOR.sub("", solution).strip()


def _plain(number: Number) -> str:
    """Format a number as text without an exponent."""
    return f"{number:f}" if hasattr(number, "as_tuple") else str(number)


def _find(fields: object, names: Iterable[str]) -> str | None:
    """Return the first of the given column names that has a value in the row, or None."""
    return next((name for name in names if _value(fields, name) is not None), None)


def _value(fields: object, name: str) -> Any:
    """Return the value of a column or of a key in a column (`a.b`), or None if it is missing."""
    if isinstance(fields, Mapping) and name in fields:
        return fields[name]
    column, _, key = name.partition(".")
    inner = fields.get(column) if isinstance(fields, Mapping) and key else None
    return None if inner is None else _value(inner, key)


def _prompt_of(value: Any, where: str) -> Prompt:
    """Check a prompt, which is a string or a list of chat messages, and return it.

    Tables store chat messages as JSON text, which is parsed. If the content of a message is a list
    of text parts, the parts are joined.
    """
    if isinstance(value, str) and value.lstrip().startswith('[{"'):
        with contextlib.suppress(ValueError):
            value = json.loads(value)
    fits = value.strip() if isinstance(value, str) else isinstance(value, list) and value
    require(fits, where, "a non-empty text or a list of chat messages", reprlib.repr(value))
    if isinstance(value, str):
        return value
    messages = []
    for message in value:
        parts = [message.get(x) for x in ("role", "content")] if isinstance(message, dict) else [0]
        if isinstance(parts[-1], list):
            texts = [part.get("text") for part in parts[-1] if isinstance(part, dict)]
            are_all = all(isinstance(x, str) for x in texts) and len(texts) == len(parts[-1])
            parts[-1] = "".join(texts) if are_all else None
        are_texts = all(isinstance(part, str) for part in parts)
        require(are_texts, where, "messages with the texts 'role' and 'content'", repr(message))
        # Remove keys with the value None. Tables use None for missing keys such as tool_calls.
        present = {key: item for key, item in message.items() if item is not None}
        messages.append({**present, "content": parts[-1]})
    return messages


def _advice(fields: Mapping[str, object]) -> str:
    names = [*fields, "COLUMN"][:2]
    words = f"data.columns={{prompt: {names[0]}, answer: {names[-1]}}}"
    return f"; say which columns they are: '{words}'" if fields else ""
