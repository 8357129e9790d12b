"""Conversion of a row of a data set to an example. Common column names are recognized."""

from __future__ import annotations

import json
import re
import reprlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from grpo_fast.data import Example, Fields, Prompt, text_of
from grpo_fast.data.answers import HASHES, MAX_DIGITS, marked_content, parse_number, read_gold
from grpo_fast.errors import require

# Usual names of columns. The first name that has a value in a row counts, in upper or lower case,
# with spaces or underscores.
PROMPTS = ("prompt", "question", "problem", "query", "instruction", "messages")
# MBPP has the column "text". LeetCodeDataset has imports in "prompt", and the task in "query".
CODE_PROMPTS = ("query", *PROMPTS, "text")
ANSWERS = ("answer", "ground_truth", "reward_model.ground_truth", "final_answer", "expected_answer",
           "correct_answer", "answers")  # fmt: skip
SOLUTIONS = ("solution", "output", "response")  # the gold answer may be marked inside them
TESTS = ("tests", "test_list", "test", "input_output")
# Columns that belong to a question. A row is refused if its prompt does not contain them.
PARTS = {
    "context", "passage", "article", "paragraph", "document", "story", "premise", "body", "table",
    "hint", "input", "choices", "options", "system", "system_prompt", "tools", "image", "images",
}  # fmt: skip
OPTION = re.compile(r"(?:op|option_?|choice_?)[a-j]|(?-i:[A-J])", re.I)  # a column per choice
# Annotations of GSM8K's solutions, such as `<<48/2=24>>`.
_CALCULATOR = re.compile(r"<<[^<>\n]*>>")
# Matches one half of a UTF-16 surrogate pair. JSON may contain a single half, but tokenizers reject
# it.
_SURROGATE = re.compile("[\ud800-\udfff]")
_MESSAGES_AS_TEXT = re.compile(r"\[\s*\{\s*['\"](role|content|from|value)['\"]\s*:")


class EmptyField(ValueError):
    """A row without a prompt, or a row of GSM8K without an answer.

    The setting `data.drop_unusable` skips such rows.
    """

    def __init__(self, where: str, expected: str, came: str) -> None:
        remedy = "data.drop_unusable=true skips such rows"
        super().__init__(f"{where}: expected {expected}, got {came}; {remedy}")


def parse_record(where: str, fields: Any, data: Any) -> Example:
    """Convert a row to an example. The `fields` of the example are all columns except `prompt`.

    Args:
        where: the row's location, for error messages.
        fields: the row's columns.
        data: the section `data` of a configuration. With `data.task=gsm8k`, every answer must end
            with `#### <number>`. In `data.columns`, a dot selects a key or an index inside a
            column, as in "reward_model.ground_truth" or "answers.0".

    Raises:
        EmptyField: the prompt is empty, or with `data.task=gsm8k` the answer.
        ValueError: the row has no prompt, or a value that cannot be used.
    """
    # 1. Find the prompt, the answer and the solution.
    require(isinstance(fields, dict), where, "a JSON object", type(fields).__name__)
    columns = data.columns
    for role, column in columns.items():
        is_found = role == "solution" or _has(fields, column)
        require(is_found, where, f"a field {column!r}", ", ".join(map(repr, fields)) or "none")
    usual = PROMPTS if find(fields, TESTS) is None else CODE_PROMPTS
    names = {"prompt": usual, "answer": ANSWERS, "solution": SOLUTIONS}
    names |= {role: (column,) for role, column in columns.items()}
    name, prompt = _prompt(fields, names["prompt"], where)
    if "{" not in (data.prompt_template or ""):
        _check_parts(fields, {name, *columns.values()}, text_of(prompt), where)
    label = column_of(fields, names["answer"])
    texts = [column_of(fields, [name]) for name in names["solution"]]
    solution = next((text for text in texts if isinstance(text, str)), None)
    if label is None and solution is not None and marked_content(solution) is not None:
        label = solution
    # 2. Check and convert the values.
    answer = _answer_text(label, where)
    lone = _SURROGATE.search(json.dumps([prompt, answer, solution], ensure_ascii=False))
    require(not lone, where, "Unicode", lone and f"the lone surrogate {lone[0]!r}")
    others = {key: value for key, value in fields.items() if key != "prompt"}
    if "tests" in columns:
        others["tests"] = column_of(fields, names["tests"])
    # 3. If the answer column contains a full solution, extract the gold answer from it. With
    # data.task=gsm8k, every answer must have the form of such a solution.
    is_gsm8k = data.task == "gsm8k"
    if is_gsm8k and label is None:
        raise EmptyField(where, "an answer", f"none in the fields {', '.join(map(repr, fields))}")
    content = marked_content(answer or "", (HASHES,)) or ""
    fits = not is_gsm8k or parse_number(content) is not None
    expected = f"'{HASHES} <number>' at its end, with at most {MAX_DIGITS} digits"
    came = f"{str(label)[-60:]!r}; data.task=jsonl reads other answers"
    require(fits, f"{where}: answer", expected, came)
    if answer is None:
        return Example(prompt, None, solution, others, label)
    gold = read_gold(f"{HASHES} {content}" if is_gsm8k else answer)
    worked = _CALCULATOR.sub("", answer).strip() if gold != answer else None
    return Example(prompt, gold, solution or worked, others, label)


def find(fields: Fields, names: Iterable[str]) -> str | None:
    """Return the first of the given names that has a value in the row, as the row writes it."""
    written = {key.lower().replace(" ", "_"): key for key in fields}
    for name in names:
        for key in (name, written.get(name.lower().replace(" ", "_"), name)):
            if _value(fields, key) is not None:
                return key
    return None


def column_of(fields: Fields, names: Iterable[str]) -> Any:
    """Return the value of the first of the given columns that has one, or None."""
    name = find(fields, names)
    return None if name is None else _value(fields, name)


def _value(fields: Fields, name: str) -> Any:
    """Return the value of a column, or of a key or index in it (`a.b`, `a.0`), or None."""
    value: Any = fields
    for part in [name] if name in fields else name.split("."):
        if isinstance(value, list) and part.isdecimal():
            value = value[int(part)] if int(part) < len(value) else None
        else:
            value = value.get(part) if isinstance(value, Mapping) else None
    # Tables have NaN or an empty text in place of a missing value. Only NaN differs from itself.
    is_empty = value != value or (isinstance(value, str) and not value.strip())
    return None if is_empty else value


def _has(fields: Fields, name: str) -> bool:
    """Return whether the row has a column, or a key in it (`a.b`), which may be empty."""
    above, _, last = name.rpartition(".")
    parent = _value(fields, above)
    is_key = isinstance(parent, Mapping) and last in parent
    return name in fields or is_key or find(fields, [name]) is not None


def _prompt(fields: Fields, names: Sequence[str], where: str) -> tuple[str, Prompt]:
    """Return the name of the column that contains the prompt, and the checked prompt."""
    name = find(fields, names)
    if name is None and {key.lower() for key in fields} & {key.lower() for key in names}:
        raise EmptyField(where, "a prompt", "an empty field")
    remedy = "say which column it is: data.columns={prompt: COLUMN, answer: COLUMN}"
    came = f"{', '.join(map(repr, fields)) or 'none'}; {remedy}"
    require(name is not None, where, "a field 'prompt' or 'question'", came)
    value = _value(fields, name)
    where = f"{where}: field {name!r}"
    value = str(value) if type(value) is int else value
    if isinstance(value, str):
        is_text = not _MESSAGES_AS_TEXT.match(value.lstrip())
        require(is_text, where, "chat messages as a list, not as text", reprlib.repr(value))
        return name, value
    fits = isinstance(value, list) and value
    require(fits, where, "a non-empty text or a list of chat messages", reprlib.repr(value))
    messages = [_message(message, where) for message in value]
    is_asked = name.lower() == "prompt" or messages[-1]["role"] != "assistant"
    expected = "messages that end with the user's; put the assistant's into the column answer"
    require(is_asked, where, expected, reprlib.repr(value[-1]))
    return name, messages


def _message(message: Any, where: str) -> dict[str, Any]:
    """Check a chat message, and return it without the keys that have no value."""
    fits = isinstance(message, dict) and all(
        isinstance(message.get(key), str) for key in ("role", "content")
    )
    require(fits, where, "messages with the texts 'role' and 'content'", reprlib.repr(message))
    # Tables use None for missing keys such as tool_calls.
    return {key: value for key, value in message.items() if value is not None}


def _check_parts(fields: Fields, used: Collection[str], prompt: str, where: str) -> None:
    """Refuse a question that lacks its context, its choices, an image or its system message."""
    for key, value in fields.items():
        is_part = key not in used and (key.lower() in PARTS or OPTION.fullmatch(key))
        if is_part and value and value != "[]":
            template = f"{{{key}}}\\n\\n{{question}}"
            remedy = f'add \'data.prompt_template="{template}"\', or leave it out: "{{question}}"'
            fits = str(value) in prompt
            require(fits, f"{where}: field {key!r}", f"this text in the prompt ({remedy})", "no")


def _answer_text(answer: Any, where: str) -> str | None:
    """Return the answer as text. Return None for an answer that only custom rewards can read."""
    if answer is None or isinstance(answer, (dict, list)):
        return None
    if isinstance(answer, (int, float)):
        return str(answer).removesuffix(".0")  # integers, in tables with missing values
    # Skywork-OR1 writes answers as '["4"]'. No completion would equal this text.
    text = answer.strip()
    is_list = text.endswith("]") and text[:1] == "[" and text[1:].lstrip().startswith('"')
    require(not is_list, where, "one answer as text, not a JSON list of texts", repr(answer))
    return answer
