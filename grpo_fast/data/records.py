"""Turn a row into an example: find its prompt and its answer under their usual names."""

from __future__ import annotations

import contextlib
import json
import math
import re
import reprlib
from collections.abc import Mapping
from typing import Any

from grpo_fast.data.answers import (
    BOXED,
    HASHES,
    MAX_DIGITS,
    TAG,
    Number,
    marked_content,
    parse_number,
)
from grpo_fast.data.example import DatasetError, Example, Prompt, need
from grpo_fast.errors import require

PROMPTS = ("prompt", "question", "problem", "query", "messages")
VERLS_ANSWER = "reward_model.ground_truth"
ANSWERS = ("answer", "ground_truth", VERLS_ANSWER)  # or a solution with a mark
ROLES = ("prompt", "answer", "solution")  # keys of `data.columns`
_CALCULATOR = re.compile(r"<<[^<>\n]*>>")
_SURROGATE = re.compile("[\ud800-\udfff]")  # half a character: JSON may hold it, no tokenizer may


def parse_record(
    where: str, fields: Any, gsm8k: bool, columns: Mapping[str, str] | None = None
) -> Example:
    """Return the example in a row. Its `fields` are all columns but `prompt`.

    Args:
        where: the row's place, for error messages.
        fields: the row.
        gsm8k: every answer must end with `#### <number>`.
        columns: names of the columns `prompt`, `answer` and `solution`, dotted inside mappings.

    Raises:
        DatasetError: a row without a prompt, or with a value of another type.
    """
    need(isinstance(fields, dict), where, "a JSON object", type(fields).__name__)
    given = dict(columns or {})
    name = _find(fields, [given["prompt"]] if "prompt" in given else PROMPTS)
    if name is None:
        raise DatasetError(f"{where}: {_no_prompt(fields, given)}")
    prompt = _prompt_of(_value(fields, name), f"{where}: field {name!r}")
    names = [given["answer"]] if "answer" in given else [n for n in ANSWERS if n != name]
    answer_name = _find(fields, names)
    if answer_name is None and "answer" in given:
        raise DatasetError(f"{where}: expected a field {given['answer']!r} ({_listed(fields)})")
    answer = None if answer_name is None else _value(fields, answer_name)
    solution = _value(fields, given.get("solution", "solution"))
    if answer is None and isinstance(solution, str) and marked_content(solution) is not None:
        answer = solution
    if not isinstance(prompt, str) and prompt[-1]["role"] == "assistant":
        # A supervised row ends with its answer; a `prompt` ends with a beginning to continue.
        if name == "messages" or (answer is None and name != "prompt"):
            said = prompt.pop()["content"]
            need(prompt, f"{where}: field {name!r}", "a message before the assistant's", "none")
            answer, solution = (said if answer is None else answer), solution or said
    label = answer
    if isinstance(answer, list) and len(answer) == 1:
        answer = answer[0]
    if isinstance(answer, (dict, list)) and answer_name == VERLS_ANSWER and not gsm8k:
        answer = None  # a reward function of verl reads the label
    if type(answer) is int or (isinstance(answer, float) and math.isfinite(answer)):
        answer = str(answer)
    is_text = isinstance(answer, str) and answer.strip()
    fits = is_text or (answer is None and not gsm8k)
    need(fits, where, f"a non-empty text in field {answer_name or 'answer'!r}", repr(answer))
    fits = solution is None or isinstance(solution, str)
    need(fits, where, "a text in field 'solution'", type(solution).__name__)
    lone = _SURROGATE.search(json.dumps([prompt, answer, solution], ensure_ascii=False))
    need(not lone, where, "Unicode", lone and f"the lone surrogate {lone[0]!r}")
    others = {key: value for key, value in fields.items() if key != "prompt"}
    if answer is None:
        return Example(prompt, None, solution, others, label)
    try:
        gold = gold_answer(answer) if gsm8k else read_gold(answer)
    except ValueError as error:
        raise DatasetError(f"{where}: {error}; data.task=jsonl reads other answers") from None
    worked = strip_calculator(answer) if gold != answer else None
    return Example(prompt, gold, solution or worked, others, label)


def read_gold(answer: str) -> str:
    r"""Return a gold answer without the text around it.

    A marked number (`#### $1,080`, `<answer>18</answer>`, `\boxed{18}`) stands for the whole text,
    and so does anything in `<answer>` or `\boxed`. Another text is the answer itself: `####` may
    be a heading.
    """
    content = marked_content(answer)
    number = None if content is None else parse_number(content)
    if number is not None:
        return _plain(number)
    return (marked_content(answer, (TAG, BOXED)) or "").strip() or answer


def gold_answer(solution: str) -> str:
    """Return GSM8K's number after the last `####`, without commas: '… #### 1,080' is '1080'.

    Raises:
        ValueError: the text has no such number.
    """
    content = marked_content(solution, (HASHES,))
    marked = content is not None
    require(marked, "answer", "'#### <number>' at the end of the answer", repr(solution[-60:]))
    number = parse_number(content)
    expected = f"a number after '####', of at most {MAX_DIGITS} digits"
    require(number is not None, "answer", expected, repr(content[:60]))
    return _plain(number)


def strip_calculator(solution: str) -> str:
    """Return the solution without GSM8K's `<<48/2=24>>` calculator notes."""
    return _CALCULATOR.sub("", solution).strip()


def _plain(number: Number) -> str:
    return f"{number:f}" if hasattr(number, "as_tuple") else str(number)


def _find(fields: Mapping[str, Any], names: Any) -> str | None:
    """Return the first of these columns that has a value in the row."""
    return next((name for name in names if _value(fields, name) is not None), None)


def _value(fields: Any, name: str) -> Any:
    """Return the value of a column, or of a key inside it; None without one."""
    if isinstance(fields, Mapping) and name in fields:
        return fields[name]
    first, _, rest = name.partition(".")
    inner = fields.get(first) if isinstance(fields, Mapping) and rest else None
    return None if inner is None else _value(inner, rest)


def _prompt_of(value: Any, where: str) -> Prompt:
    """Return a prompt of text or of messages, whose parts of text are joined.

    A table may hold messages as the text of their JSON.
    """
    if isinstance(value, str) and value.lstrip().startswith('[{"'):
        with contextlib.suppress(ValueError):
            value = json.loads(value)
    fits = value.strip() if isinstance(value, str) else isinstance(value, list) and value
    need(fits, where, "a non-empty text or a list of chat messages", reprlib.repr(value))
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
        need(are_texts, where, "messages with the texts 'role' and 'content'", repr(message))
        kept = {key: item for key, item in message.items() if item is not None}
        messages.append({**kept, "content": parts[-1]})
    return messages


def _no_prompt(fields: Mapping[str, Any], given: Mapping[str, str]) -> str:
    if "prompt" in given:
        return f"expected a field {given['prompt']!r} ({_listed(fields)})"
    listed = ", ".join(map(repr, fields)) or "none"
    said = f"expected a field 'prompt' or 'question', found {listed}"
    names = [*fields, "COLUMN"][:2]
    words = f"data.columns={{prompt: {names[0]}, answer: {names[-1]}}}"
    return f"{said}; say which columns they are: '{words}'" if fields else said


def _listed(fields: Mapping[str, Any]) -> str:
    return f"found {', '.join(map(repr, fields)) or 'none'}"
