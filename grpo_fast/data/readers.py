"""Readers of files, folders and hub datasets, which yield rows and their locations."""

from __future__ import annotations

import csv
import functools
import gzip
import io
import json
import os
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from grpo_fast.data import hub
from grpo_fast.data.escape import reason
from grpo_fast.errors import require

Rows = Iterator[tuple[str, Any]]  # (location such as "file:line", fields)
Splits = dict[str, Callable[[], Rows]]  # split name -> function that reads its rows

LINES = (".jsonl", ".ndjson")
TABLES = {".csv": ",", ".tsv": "\t"}  # file extension -> delimiter
ARROW = {".parquet": "parquet", ".arrow": "arrow"}
FORMATS = (*LINES, ".json", *TABLES, *ARROW)
TEST_SPLITS = ("test", "validation", "valid", "val", "dev", "eval")


def is_local(source: str) -> bool:
    """Return whether a source is a file or folder rather than a hub id (owner/name)."""
    owner, _, name = source.partition("/")
    is_id = owner and name and "/" not in name and not owner.startswith((".", "~"))
    is_file = source.removesuffix(".gz").endswith(FORMATS)
    return not is_id or is_file or os.path.exists(source)


def local_splits(path: Path) -> Splits:
    """Return the splits of a file or folder.

    A single file becomes the split "train". If its name contains "train" and the folder has a file
    of the same name with "test" instead, that file becomes the split "test".

    Raises:
        ValueError: the path does not exist, or the folder has no data.
    """
    expected = "a .jsonl, .json, .csv, .tsv or .parquet file (or .gz), or a folder with train.jsonl"
    if not os.path.isdir(path):  # without permission, Path.is_dir would raise an error
        if not os.path.isfile(path):
            raise ValueError(f"data.path: expected {expected}, found nothing at {path}")
        train, test = path, path.with_name(path.name.replace("train", "test", 1))
    else:
        if os.path.isfile(path / "dataset_dict.json") or os.path.isfile(path / "state.json"):
            return _datasets(str(path), "load_from_disk", str(path))
        named = {n: [path / f"{n}{f}{z}" for f in FORMATS for z in ("", ".gz")]
                 for n in ("train", *TEST_SPLITS)}  # fmt: skip
        files = {n: next(filter(os.path.isfile, paths), None) for n, paths in named.items()}
        if files["train"] is None:
            inside = (*path.glob("*"), *path.glob("*/*"))
            if not any(file.suffix in (*FORMATS, ".gz") for file in inside):
                raise ValueError(f"data.path: expected {expected}, found nothing at {path}")
            return _datasets(str(path), "load_dataset", str(path))
        train = files["train"]
        test = next((files[n] for n in TEST_SPLITS if files[n]), train)
    splits: Splits = {"train": lambda: read_file(train)}
    if test != train and os.path.isfile(test):
        splits["test"] = lambda: read_file(test)
    return splits


def hub_splits(name: str) -> Splits:
    """Return the splits of a hub dataset.

    Args:
        name: `owner/name`, or `owner/name:config`.
    """
    repository, _, config = name.partition(":")
    config = config or ("main" if repository == "openai/gsm8k" else "")
    return _datasets(name, "load_dataset", repository, config or None)


def read_file(path: Path) -> Rows:
    """Yield the rows of a file. The file extension determines the format.

    Raises:
        ValueError: the file is damaged or empty.
    """
    ending = Path(path.name.removesuffix(".gz")).suffix
    if ending in ARROW:
        loaded = _datasets(str(path), "load_dataset", ARROW[ending], data_files=str(path))
        yield from loaded["train"]()
        return
    tables = {name: functools.partial(_read_table, mark) for name, mark in TABLES.items()}
    readers: dict[str, Callable[[Path], Rows]] = {".json": _read_json, **tables}
    count = 0
    try:
        for place, fields in readers.get(ending, read_jsonl)(path):
            count += 1
            yield place, fields
    except (OSError, EOFError, UnicodeError) as error:
        why = reason(error)
        raise ValueError(f"data.path: expected a readable file, got {path}: {why}") from None
    if count == 0:
        raise ValueError(f"{path}: expected at least one line, the file is empty")


def read_jsonl(path: Path) -> Rows:
    """Yield the objects of a file with one JSON object per line. Blank lines are skipped.

    Raises:
        ValueError: the file does not exist, or a line is not JSON.
    """
    if not os.path.isfile(path):
        raise ValueError(f"data.path: expected a .jsonl file, found nothing at {path}")
    with _open(path) as file:
        for number, raw in enumerate(file, start=1):
            if number == 1:
                raw = raw.removeprefix(BOM_UTF8)
            if raw.strip():
                yield f"{path}:{number}", _parse_json(f"{path}:{number}", raw)


def _read_json(path: Path) -> Rows:
    """Yield the rows of a `.json` file.

    The file may contain a list of rows, an object with one list of rows, a single row, or JSON
    lines.
    """
    with _open(path) as file:
        raw = file.read().removeprefix(BOM_UTF8)
    try:
        content = _parse_json(str(path), raw)
    except ValueError:  # a .json file may hold JSON lines
        if b"\n" not in raw.strip():
            raise
        yield from read_jsonl(path)
        return
    rows = content if isinstance(content, list) else [content]
    if isinstance(content, dict):
        lists = [x for x in content.values() if isinstance(x, list)]
        rows = lists[0] if len(lists) == 1 else [content]
    for number, fields in enumerate(rows, start=1):
        yield f"{path}[{number}]", fields


def _read_table(delimiter: str, path: Path) -> Rows:
    # Use the csv module instead of `datasets`, which reads tables with pandas. pandas turns 007
    # into 7 and "None" into a missing value.
    csv.field_size_limit(1 << 30)  # the default of 128 KiB is too small for long prompts
    with _open(path) as file:
        text = (line.decode("utf-8-sig" if i == 0 else "utf-8") for i, line in enumerate(file))
        # Without strict=True, a quote that is never closed would swallow the rest of the file.
        reader = csv.DictReader(text, delimiter=delimiter, strict=True)
        last = 0  # last line of the previous row
        try:
            expected = f"{len(reader.fieldnames or ())} fields, as in the first line"
            last = reader.line_num
            for fields in reader:
                last = reader.line_num
                extra = fields.pop(None, [])  # empty ones come from delimiters at the end of a line
                came = f"more; put a text that contains {delimiter!r} in quotes"
                require(not any(extra), f"{path}:{last}", expected, came)
                yield f"{path}:{last}", fields
        except csv.Error as error:
            remedy = 'end a text in quotes with ", and write "" for a quote in it'
            raise ValueError(f"{path}:{last + 1}: not a row ({error}); {remedy}") from None


def _open(path: Path) -> io.BufferedIOBase:
    return gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")


def _parse_json(where: str, raw: bytes) -> Any:
    try:
        return json.loads(raw.decode(), object_pairs_hook=_unique_keys)
    except UnicodeDecodeError as error:
        at = f"{error.reason} at byte {error.start}"
        raise ValueError(f"{where}: not UTF-8 text ({at})") from None
    except (ValueError, RecursionError) as error:  # bad JSON, deep nesting, 5000-digit numbers
        raise ValueError(f"{where}: not a JSON object ({error})") from None


def _unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Build a dict from JSON keys and values. Raise a ValueError if a key is repeated."""
    fields: dict[str, object] = {}
    for name, value in pairs:
        if name in fields:
            raise ValueError(f"the key {name!r} occurs twice")
        fields[name] = value
    return fields


def _datasets(source: str, function: str, *arguments: object, **options: object) -> Splits:
    """Return the splits that a function of the package `datasets` loads.

    Args:
        source: the path or hub id, for error messages.
        function: name of the function.
        *arguments: positional arguments of the function.
        **options: keyword arguments of the function.
    """
    is_hub = function == "load_dataset" and not os.path.exists(source)
    try:
        import datasets
    except ImportError:
        needs = f"data.path: loading {source!r} needs the package `datasets`"
        other = "(pip install 'grpo_fast[train]'); or name a local jsonl file"
        raise ValueError(f"{needs} {other}") from None
    offline = is_hub and hub.is_offline()
    try:
        loaded = getattr(datasets, function)(*arguments, **options)
    except Exception as error:  # `datasets` raises many types: offline, unknown name, bad file
        place = " from the hub, and no such file or folder exists here" if is_hub else ""
        # DatasetGenerationError only says that an error occurred. Its cause says which one.
        is_vague = type(error).__name__ == "DatasetGenerationError"
        why = hub.LOCAL if offline else reason((is_vague and error.__cause__) or error)
        raise ValueError(f"data.path: could not load {source!r}{place}: {why}") from error
    every = loaded if isinstance(loaded, dict) else {"train": loaded}

    def rows(split: str) -> Rows:
        for index, fields in enumerate(every[split], start=1):
            # Convert dates and bytes to text, because worker processes receive the fields as JSON.
            yield f"{source}[{split}]:{index}", json.loads(json.dumps(fields, default=str))

    return {split: functools.partial(rows, split) for split in every}
