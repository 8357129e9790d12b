"""Conversion of a row of a data set to an example. Common column names are recognized."""

from __future__ import annotations

import ast
import contextlib
import json
import math
import re
import reprlib
from collections.abc import Iterable, Mapping
from typing import Any

from grpo_fast.data import Example, Fields, Prompt, text_of
from grpo_fast.data.answers import HASHES, MAX_DIGITS, marked_content, parse_number, read_gold
from grpo_fast.errors import require

# Usual names of columns. The first name that has a value in a row counts, in upper or lower case,
# with spaces or underscores.
DIALOGUES = ("messages", "conversations", "conversation")
PROMPTS = ("prompt", "question", "problem", "query", "question_stem", "instruction", *DIALOGUES)
VERLS_ANSWER = "reward_model.ground_truth"
ANSWERS = (
    "answer", "ground_truth", VERLS_ANSWER, "final_answer", "expected_answer", "correct_answer",
    "answerKey", "answers",
)  # fmt: skip
SOLUTIONS = ("solution", "output", "response")  # the gold answer may be marked inside them
TESTS = ("tests", "test_list", "test", "input_output")
CHOICES = ("choices", "options")
OPTION = re.compile(r"(?:op|option_?|choice_?)([a-j])|(?-i:([A-J]))", re.I)  # a column per choice
LETTER_ENDS = (". ", ") ", ": ", ".", ")", ":")  # in the choices that a text contains
LABELS = ("label", "correct", "correct_option", "cop", "answer_index", "answer_idx")
CONTEXTS = (
    "context", "passage", "article", "paragraph", "document", "story", "premise", "body", "table",
    "hint",
)  # fmt: skip
UNUSABLE = ("tools", "image", "images")  # a prompt cannot contain them
ROLES = {"human": "user", "gpt": "assistant", "model": "assistant"}
_CALCULATOR = re.compile(r"<<[^<>\n]*>>")
# Matches one half of a UTF-16 surrogate pair. JSON may contain a single half, but tokenizers reject
# it.
_SURROGATE = re.compile("[\ud800-\udfff]")
_TEXTS_AS_JSON = re.compile(r'\s{0,9}+\[\s*".*"\s*\]\s*', re.S)
_MESSAGES_AS_TEXT = re.compile(r"\[\s*\{\s*['\"](role|content|from|value)['\"]\s*:")


class EmptyField(ValueError):
    """A row with an empty prompt or answer. The setting `data.drop_unusable` skips such rows."""


def parse_record(
    where: str,
    fields: Any,
    gsm8k: bool,
    columns: Mapping[str, str] | None = None,
    template: str | None = None,
) -> Example:
    """Convert a row to an example. The `fields` of the example are all columns except `prompt`.

    Args:
        where: the row's location, for error messages.
        fields: the row's columns.
        gsm8k: if True, every answer must end with `#### <number>`.
        columns: names of the columns for `prompt`, `answer`, `solution` and `tests`. A dot selects
            a key or an index inside a column, as in "reward_model.ground_truth" or "answers.0".
        template: the setting `data.prompt_template`, which may insert further columns.

    Raises:
        EmptyField: the prompt or the answer is empty.
        ValueError: the row has no prompt, or a value that cannot be used.
    """
    # 1. Find the prompt, the answer and the solution.
    require(isinstance(fields, dict), where, "a JSON object", type(fields).__name__)
    given = dict(columns or {})
    for role, column in given.items():
        if role != "solution" and find(fields, [column]) is None:
            listed = ", ".join(map(repr, fields)) or "none"
            raise ValueError(f"{where}: expected a field {column!r} (found {listed})")
    name, prompt = _prompt(fields, given.get("prompt"), where)
    names = [given["answer"]] if "answer" in given else [x for x in ANSWERS if x != name.lower()]
    answer = column_of(fields, names)
    solution = _solution(fields, given.get("solution"))
    is_marked = isinstance(solution, str) and marked_content(solution) is not None
    if answer in (None, "") and is_marked:
        answer = solution
    # 2. Rows for supervised training end with a message of the assistant. Use this message as the
    # answer. The column `prompt` is an exception: its final assistant message may be the beginning
    # of the completion.
    if not isinstance(prompt, str) and prompt[-1]["role"] == "assistant":
        if name.lower() in DIALOGUES or (answer is None and name.lower() != "prompt"):
            reply = prompt.pop()["content"]
            require(prompt, f"{where}: field {name!r}", "a message before the assistant's", "none")
            answer = reply if answer is None else answer
            solution = solution or reply
    # 3. Add the columns that belong to the question, and convert the answer to text.
    choices = _choices(fields)
    answer = column_of(fields, LABELS) if choices and answer is None else answer
    label = answer
    if choices:
        prompt = _with_choices(prompt, choices, fields, where, template)
        answer = answer if answer is None else _letter(answer, choices, where)
    prompt = _with_context(prompt, name, fields, where, template)
    answer = _answer_text(answer, where, gsm8k)
    fits = solution is None or isinstance(solution, str)
    require(fits, where, "a text in field 'solution'", type(solution).__name__)
    lone = _SURROGATE.search(json.dumps([prompt, answer, solution], ensure_ascii=False))
    require(not lone, where, "Unicode", lone and f"the lone surrogate {lone[0]!r}")
    others = {key: value for key, value in fields.items() if key != "prompt"}
    if "tests" in given:
        others["tests"] = column_of(fields, [given["tests"]])
    # 4. If the answer column contains a full solution, extract the gold answer from it.
    if answer is None:
        return Example(prompt, None, solution, others, label)
    try:
        gold = gold_answer(answer) if gsm8k else read_gold(answer)
    except ValueError as error:
        raise ValueError(f"{where}: {error}; data.task=jsonl reads other answers") from None
    worked = strip_calculator(answer) if gold != answer else None
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


def lettered(choices: Any) -> dict[str, str] | None:
    """Return the choices of a question by their letters, or None if the value is not choices.

    The value is a list of texts, a mapping from letters to texts, a mapping of two lists `label`
    and `text`, or a list of mappings with `label` and `text`.
    """
    if isinstance(choices, list) and all(isinstance(x, Mapping) for x in choices):
        choices = {key: [x.get(key) for x in choices] for key in ("label", "text")}
    if isinstance(choices, Mapping) and isinstance(choices.get("text"), list):
        choices = dict(zip(choices.get("label") or "", choices["text"], strict=False))
    if isinstance(choices, list) and len(choices) <= 26:
        choices = {chr(ord("A") + number): text for number, text in enumerate(choices)}
    if not isinstance(choices, Mapping) or len(choices) < 2:
        return None
    fits = all(isinstance(text, (str, int, float)) for text in choices.values())
    return {str(letter): str(text) for letter, text in choices.items()} if fits else None


def choice_lines(choices: Mapping[str, str]) -> str:
    """Return one line for each choice, such as `A. Paris`. Keep texts that have their letter."""
    lines = []
    for letter, text in choices.items():
        has_letter = text.lstrip("(").startswith(tuple(letter + end for end in LETTER_ENDS))
        lines.append(text if has_letter else f"{letter}. {text}")
    return "\n".join(lines)


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
    return read_gold(f"{HASHES} {content}")


def strip_calculator(solution: str) -> str:
    """Return a GSM8K solution without calculator annotations such as `<<48/2=24>>`."""
    return _CALCULATOR.sub("", solution).strip()


def _value(value: Any, name: str) -> Any:
    """Return the value of a column, or of a key or index in it (`a.b`, `a.0`), or None."""
    if isinstance(value, Mapping) and name in value:
        found = value[name]
        return None if isinstance(found, float) and math.isnan(found) else found
    first, _, rest = name.partition(".")
    if isinstance(value, list) and first.isdecimal() and int(first) < len(value):
        inner = value[int(first)]
        return _value(inner, rest) if rest else inner
    inner = value.get(first) if isinstance(value, Mapping) and rest else None
    return None if inner is None else _value(inner, rest)


def _prompt(fields: Fields, column: str | None, where: str) -> tuple[str, Prompt]:
    """Return the name and the value of the column that contains the prompt."""
    # MBPP has the column "text". LeetCodeDataset has imports in "prompt", and the task in "query".
    names = PROMPTS if find(fields, TESTS) is None else ("query", *PROMPTS, "text")
    name = column or find(fields, names)
    if name is None:
        if {key.lower() for key in fields} & {*names}:
            raise EmptyField(f"{where}: expected a prompt, got an empty field")
        listed = ", ".join(map(repr, fields)) or "none"
        remedy = "say which column it is: data.columns={prompt: COLUMN, answer: COLUMN}"
        raise ValueError(
            f"{where}: expected a field 'prompt' or 'question', found {listed}; {remedy}"
        )
    for key in UNUSABLE:
        value = column_of(fields, [key])
        expected = "none, because prompts are texts; rename it if only a reward reads it"
        is_empty = not value or value == "[]"
        require(is_empty, f"{where}: field {key!r}", expected, reprlib.repr(value))
    return name, _prompt_of(column_of(fields, [name]), f"{where}: field {name!r}")


def _solution(fields: Fields, column: str | None) -> Any:
    """Return the worked solution of a row, or None. A number is returned as text."""
    solution = column_of(fields, [column or SOLUTIONS[0]])
    if solution is None:  # the other columns may contain something else
        texts = [column_of(fields, [name]) for name in SOLUTIONS[1:]]
        solution = next((text for text in texts if isinstance(text, str)), None)
    return str(solution) if type(solution) in (int, float) else solution


def _prompt_of(value: Any, where: str) -> Prompt:
    """Check a prompt, which is a string or a list of chat messages, and return it.

    Tables store chat messages as JSON text, or as pandas prints them. Both are parsed. The keys
    `from` and `value` and the roles `human` and `gpt` of ShareGPT are renamed. If the content of a
    message is a list of text parts, the parts are joined.
    """
    if type(value) is int:
        value = str(value)
    if isinstance(value, str) and _MESSAGES_AS_TEXT.match(value.lstrip()):
        try:
            value = json.loads(value)
        except ValueError:
            try:
                value = ast.literal_eval(value.strip())
            except (ValueError, SyntaxError, RecursionError, MemoryError):
                came = reprlib.repr(value)
                raise ValueError(f"{where}: expected messages as JSON text, got {came}") from None
    if isinstance(value, str) and not value.strip():
        raise EmptyField(f"{where}: expected a non-empty text, got {value!r}")
    fits = isinstance(value, str) or (isinstance(value, list) and value)
    require(fits, where, "a non-empty text or a list of chat messages", reprlib.repr(value))
    return value if isinstance(value, str) else [_message(message, where) for message in value]


def _message(message: Any, where: str) -> dict[str, Any]:
    """Check a chat message, and return it with the keys and roles of chat templates."""
    expected = "messages with the texts 'role' and 'content'"
    require(isinstance(message, dict), where, expected, reprlib.repr(message))
    role = message.get("role", message.get("from"))
    content = message.get("content", message.get("value"))
    if isinstance(content, list):
        texts = [part.get("text") for part in content if isinstance(part, dict)]
        are_all = all(isinstance(x, str) for x in texts) and len(texts) == len(content)
        content = "".join(texts) if are_all else None
    elif content is None and message.get("tool_calls"):
        content = ""
    fits = isinstance(role, str) and isinstance(content, str)
    require(fits, where, expected, reprlib.repr(message))
    # Remove keys with the value None. Tables use None for missing keys such as tool_calls.
    dropped = ("from", "value")
    present = {k: x for k, x in message.items() if x is not None and k not in dropped}
    return {**present, "role": ROLES.get(role, role), "content": content}


def _choices(fields: Fields) -> dict[str, str] | None:
    """Return the choices of a row, from one column or from one column for each choice, or None."""
    name = find(fields, CHOICES)
    if name is not None:
        return lettered(fields[name])
    columns = [(OPTION.fullmatch(key), text) for key, text in fields.items() if text is not None]
    return lettered({(key[1] or key[2]).upper(): text for key, text in columns if key})


def _with_choices(
    prompt: Prompt, choices: Mapping[str, str], fields: Fields, where: str, template: str | None
) -> Prompt:
    """Add lettered choices to a question, unless the question or the template contains them."""
    slots = [f"{{{key}}}" for key in fields if key.lower() in CHOICES or OPTION.fullmatch(key)]
    # A question may mention the texts of choices without their letters, as in "is 1 or 2 larger?".
    whole = text_of(prompt)
    is_shown = all(
        any(f"{letter}{end}{text}" in whole for end in LETTER_ENDS)
        for letter, text in choices.items()
    )
    if is_shown or any(slot in (template or "") for slot in slots):
        return prompt
    expected = "a text prompt, to which the choices can be added"
    require(isinstance(prompt, str), f"{where}: choices", expected, "messages")
    return f"{prompt}\n{choice_lines(choices)}"


def _letter(answer: Any, choices: Mapping[str, str], where: str) -> str:
    """Return the letter of the gold answer: a letter, the text of a choice, or its index from 0."""
    letters = [*choices]
    if str(answer) in letters:
        return str(answer)
    if str(answer) in choices.values():
        return letters[[*choices.values()].index(str(answer))]
    is_index = str(answer).isdecimal() and int(answer) < len(letters)
    expected = (
        f"one of the letters {', '.join(letters)}, a choice, or an index below {len(letters)}"
    )
    require(is_index, f"{where}: the answer", expected, reprlib.repr(answer))
    return letters[int(answer)]


def _with_context(
    prompt: Prompt, name: str, fields: Fields, where: str, template: str | None
) -> Prompt:
    """Add the input of an instruction, and refuse a question about a text that it lacks."""
    if name.lower() == "instruction":
        given = column_of(fields, ["input"])
        prompt = f"{prompt}\n\n{given}" if given and isinstance(prompt, str) else prompt
    if "{" in (template or ""):
        return prompt
    for key, value in fields.items():
        if value and key != name and key.lower() in (*CONTEXTS, *CHOICES):
            parts = ("{question}", f"{{{key}}}")
            text = "\\n\\n".join(parts if key.lower() in CHOICES else parts[::-1])
            remedy = f'add \'data.prompt_template="{text}"\', or leave it out: "{{question}}"'
            fits = str(value) in text_of(prompt) or (key.lower() in CHOICES and lettered(value))
            require(fits, f"{where}: field {key!r}", f"this text in the prompt ({remedy})", "no")
    return prompt


def _answer_text(answer: Any, where: str, gsm8k: bool) -> str | None:
    """Return the answer as text. Return None for an answer that only custom rewards can read."""
    if isinstance(answer, str) and _TEXTS_AS_JSON.fullmatch(answer):  # in Skywork-OR1
        with contextlib.suppress(ValueError):
            answer = json.loads(answer)
    if isinstance(answer, list) and len(answer) == 1:
        answer = answer[0]
    if isinstance(answer, (dict, list)) and not gsm8k:
        return None
    if isinstance(answer, float) and math.isfinite(answer):
        answer = str(answer).removesuffix(".0")  # tables write integers with missing values so
    elif type(answer) in (int, bool):
        answer = str(answer)
    if isinstance(answer, str) and not answer.strip():
        raise EmptyField(f"{where}: expected a non-empty text in the answer, got {answer!r}")
    fits = isinstance(answer, str) or (answer is None and not gsm8k)
    require(fits, where, "a non-empty text in field 'answer'", repr(answer))
    return answer
