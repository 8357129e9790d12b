"""Examples from a jsonl file, a folder of two, or the hub: GSM8K, or any prompts with answers."""

from __future__ import annotations

import json
import logging
import os
import random
import re
import reprlib
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from grpo_fast.data import hub
from grpo_fast.data.example import DatasetError, DataSource, Example, need
from grpo_fast.data.prompts import Form, ShotPrompts
from grpo_fast.errors import conflict, require

log = logging.getLogger(__name__)

SPLIT_SEED = "grpo_fast held-out lines"
FORMATS = (".jsonl", ".json", ".csv", ".tsv", ".parquet", ".arrow", ".gz")
PROMPT_FIELDS = ("prompt", "question", "messages")
_CALCULATOR = re.compile(r"<<[^<>\n]*>>")
NUMBER = re.compile(r"-?[0-9][0-9,]*(?:\.[0-9]+)?")  # as rewards read it, too: ASCII digits only
_SURROGATE = re.compile("[\ud800-\udfff]")  # half a character: JSON may hold it, no tokenizer may
MAX_DIGITS = 32  # of a number: gold answers and rewards have one bound


Rows = Iterator[tuple[str, Any]]  # where a record stands, for error messages, and its fields


def load_file_examples(
    data: DataSource, *, split: str, seed: int, count_tokens: Callable[[str], int] | None = None
) -> Sequence[Example]:
    """Train or test examples of a file, folder or hub dataset; see `load_examples`."""
    option = {name: getattr(data, name, None) for name in _OPTIONS}
    form = Form.of(option["prompt_template"], option["system_prompt"], bool(option["chat"]))
    shots, budget = option["shots"] or 0, option["shots_tokens"]
    source = option["path"] or option["name"]
    needs_train = split == "train" or shots > 0 or budget is not None
    train, test = _both_splits(option, data.task == "gsm8k", needs_train)
    need(shots <= len(train), "data.shots", f"at most the {len(train)} training examples", shots)
    need(test, "data", f"at least one test example in {source}", "none")
    if split == "test":
        chosen = test[: option["n_test"]]
    else:
        chosen = train[shots:][: option["n_train"]]
        expected = f"a training example in {source} whose prompt is not a test prompt as well"
        need(chosen, "data", expected, f"none after data.shots = {shots}" if shots else "none")
        random.Random(f"{seed}/order").shuffle(chosen)
    if budget is None:
        prefix = "".join(form.shot(e) for e in train[:shots])
        return [form.dress(e, prefix) for e in chosen]
    if count_tokens is None:
        why = "the examples are counted in tokens; pass a function"
        raise conflict("count_tokens=None", f"data.shots_tokens={budget}", why)
    pool = [e for e in train if isinstance(e.prompt, str)]
    draws = seed if split == "train" else "test"
    return ShotPrompts(chosen, pool, form, budget=budget, count_tokens=count_tokens, seed=draws)


_OPTIONS = (
    "path", "name", "prompt_template", "system_prompt", "chat", "shots", "shots_tokens", "n_train",
    "n_test",
)  # fmt: skip


def is_local(source: str) -> bool:
    """Return whether a source in one word is a file or folder rather than a hub id owner/name."""
    owner, _, name = source.partition("/")
    is_id = name and "/" not in name and not owner.startswith((".", "~")) and owner
    return not is_id or source.endswith(FORMATS) or os.path.exists(source)


def read_examples(
    path: str | Path,
    *,
    gsm8k: bool = False,
    prompt_template: str | None = None,
    system: str | None = None,
    chat: bool = False,
) -> list[Example]:
    """Every line of one jsonl file, in its order, with the prompt template applied."""
    form = Form.of(prompt_template, system, chat)
    return [form.dress(_parse(*row, gsm8k)) for row in read_jsonl(Path(path))]


# ---------------------------------------------------------------------------------------- splits
def _both_splits(
    option: dict[str, Any], gsm8k: bool, need_train: bool
) -> tuple[list[Example], list[Example]]:
    def parsed(rows: Rows) -> list[Example]:
        return [_parse(*row, gsm8k) for row in rows]

    path, name = option["path"], option["name"]
    if path:
        train_file, test_file = _locate(Path(path))
        if test_file is None:
            return _hold_out(parsed(read_jsonl(train_file)), option["n_test"], train_file)
        train, test = read_jsonl(train_file), read_jsonl(test_file)
    elif name:
        train, test = _read_hub(name, "train"), _read_hub(name, "test")
    else:
        expected = "data.path (a .jsonl file or a folder) or data.name (a hub id)"
        raise DatasetError(f"data: expected {expected}, got neither")
    tests = parsed(test)
    return _without(parsed(train) if need_train else [], tests), tests


def _locate(path: Path) -> tuple[Path, Path | None]:
    if os.path.isdir(path):  # Path's own methods raise where a folder may not be looked into
        path = path / "train.jsonl"
    if not os.path.isfile(path):
        expected = "a .jsonl file or a folder with train.jsonl"
        raise DatasetError(f"data.path: expected {expected}, found nothing at {path}")
    sibling = path.with_name("test.jsonl")
    return path, sibling if path.name == "train.jsonl" and os.path.isfile(sibling) else None


def _hold_out(
    examples: list[Example], n_test: int | None, file: Path
) -> tuple[list[Example], list[Example]]:
    """Split one file: the same lines are held out whatever the run's seed is."""
    count = max(1, len(examples) // 10) if n_test is None else n_test
    expected = f"at most the {len(examples)} lines of {file}"
    need(count <= len(examples), "data.n_test", expected, count)
    order = list(range(len(examples)))
    random.Random(SPLIT_SEED).shuffle(order)
    held_out = set(order[:count])
    test = [e for i, e in enumerate(examples) if i in held_out]
    train = [e for i, e in enumerate(examples) if i not in held_out]
    return _without(train or examples, test), test


def _without(train: list[Example], test: list[Example]) -> list[Example]:
    """Drop the training examples whose prompt is a test prompt, unless that would drop all."""
    known = {repr(e.prompt) for e in test}
    others = [e for e in train if repr(e.prompt) not in known]
    if train and not others:
        log.warning("data: every training prompt is a test prompt: the evaluation is of these")
    return others or train


# --------------------------------------------------------------------------------------- records
def _parse(where: str, fields: Any, gsm8k: bool) -> Example:
    need(isinstance(fields, dict), where, "a JSON object", type(fields).__name__)
    name = next((n for n in PROMPT_FIELDS if n in fields), None)
    if name is None:
        names = ", ".join(map(repr, fields)) or "none"
        raise DatasetError(f"{where}: expected a field 'prompt' or 'question', found {names}")
    prompt, answer, solution = fields[name], fields.get("answer"), fields.get("solution")
    _check_prompt(prompt, f"{where}: field {name!r}")
    if type(answer) in (int, float):
        answer = str(answer)
    is_text = isinstance(answer, str) and answer.strip()
    fits = is_text or (answer is None and not gsm8k)
    need(fits, where, "a non-empty text in field 'answer'", repr(answer))
    fits = solution is None or isinstance(solution, str)
    need(fits, where, "a text in field 'solution'", type(solution).__name__)
    lone = _SURROGATE.search(json.dumps([prompt, answer, solution], ensure_ascii=False))
    need(not lone, where, "Unicode", lone and f"the lone surrogate {lone[0]!r}")
    others = {key: value for key, value in fields.items() if key not in (name, "answer")}
    if answer is not None and (gsm8k or "####" in answer):
        try:
            gold = gold_answer(answer)
        except ValueError as error:
            raise DatasetError(f"{where}: {error}") from None
        return Example(prompt, gold, solution or strip_calculator(answer), others)
    return Example(prompt, answer, solution, others)


def gold_answer(solution: str) -> str:
    """GSM8K's number after the last `#### `, without commas: '… #### 1,080' → '1080'. Raises
    ValueError for none.
    """
    _, marker, tail = solution.rpartition("####")
    require(marker, "answer", "'#### <number>' at the end of the answer", repr(solution[-60:]))
    text = tail.strip()
    fits = NUMBER.fullmatch(text) and sum(map(str.isdigit, text)) <= MAX_DIGITS
    expected = f"a number after '####', of at most {MAX_DIGITS} digits"
    require(fits, "answer", expected, repr(text[:60]))
    return text.replace(",", "")


def strip_calculator(solution: str) -> str:
    """The solution without GSM8K's `<<48/2=24>>` calculator notes."""
    return _CALCULATOR.sub("", solution).strip()


def _check_prompt(value: Any, where: str) -> None:
    fits = value.strip() if isinstance(value, str) else isinstance(value, list) and value
    need(fits, where, "a non-empty text or a list of chat messages", reprlib.repr(value))
    for message in [] if isinstance(value, str) else value:
        parts = [message.get(x) for x in ("role", "content")] if isinstance(message, dict) else [0]
        are_texts = all(isinstance(part, str) for part in parts)
        need(are_texts, where, "messages with the texts 'role' and 'content'", repr(message))


# --------------------------------------------------------------------------------------- sources
def read_jsonl(path: Path) -> Rows:
    """The lines of a file with their places; blank ones are skipped. DatasetError for no JSON."""
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
                    yield f"{path}:{number}", _fields(f"{path}:{number}", raw)
    except OSError as error:
        raise DatasetError(f"data.path: expected a readable .jsonl file, got {error}") from None
    if count == 0:
        raise DatasetError(f"{path}: expected at least one line, the file is empty")


def _fields(where: str, raw: bytes) -> Any:
    try:
        return json.loads(raw.decode(), object_pairs_hook=_once)
    except UnicodeDecodeError as error:
        at = f"{error.reason} at byte {error.start}"
        raise DatasetError(f"{where}: not UTF-8 text ({at})") from None
    except (ValueError, RecursionError) as error:  # JSON's own, or a number of 5000 digits
        raise DatasetError(f"{where}: not a JSON object ({error})") from None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for name, value in pairs:
        if name in fields:
            raise ValueError(f"the key {name!r} is there twice")
        fields[name] = value
    return fields


def _read_hub(name: str, split: str) -> Rows:
    """Rows of a hub dataset, `owner/name` or `owner/name:config`."""
    try:
        import datasets
    except ImportError:
        raise DatasetError(
            f"data.name: loading {name!r} from the hub needs the package `datasets` "
            "(pip install 'grpo_fast[train]'); or give data.path a local jsonl"
        ) from None
    offline = hub.is_offline()
    repository, _, config = name.partition(":")
    config = config or ("main" if repository in ("openai/gsm8k", "gsm8k") else "")
    try:
        loaded = datasets.load_dataset(repository, config or None, split=split)
    except Exception as error:  # offline, no such dataset, no such split: one sentence
        failed = f"could not load split {split!r} of {name!r} from the hub"
        why = hub.LOCAL if offline else error
        raise DatasetError(f"data.name: {failed}: {why}") from error
    for index, fields in enumerate(loaded):
        yield f"{name}[{split}]:{index + 1}", dict(fields)
