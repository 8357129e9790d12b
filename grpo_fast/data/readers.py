"""Read the rows of a data set as people have it: files, folders, hub ids, each with its place."""

from __future__ import annotations

import csv
import functools
import gzip
import json
import os
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from grpo_fast.data import hub
from grpo_fast.data.escape import reason
from grpo_fast.data.example import DatasetError

Rows = Iterator[tuple[str, Any]]  # where a row is, for error messages, and its fields
Splits = dict[str, Callable[[], Rows]]

LINES, TABLES = (".jsonl", ".ndjson"), {".csv": ",", ".tsv": "\t"}
ARROW = {".parquet": "parquet", ".arrow": "arrow"}
FORMATS = (*LINES, ".json", *TABLES, *ARROW)
TEST_SPLITS = ("test", "validation", "valid", "val", "dev", "eval")


def is_local(source: str) -> bool:
    """Return whether a source in one word is a file or folder rather than a hub id owner/name."""
    owner, _, name = source.partition("/")
    is_id = owner and name and "/" not in name and not owner.startswith((".", "~"))
    is_file = source.removesuffix(".gz").endswith(FORMATS)
    return not is_id or is_file or os.path.exists(source)


def local_splits(path: Path) -> Splits:
    """Return the splits of a file or folder. A file is the split "train".

    If its name contains "train", the file named "test" instead, if it exists, is the split "test".
    """
    expected = "a .jsonl, .json, .csv, .tsv or .parquet file (or .gz), or a folder with train.jsonl"
    if not os.path.isdir(path):  # Path's own methods raise where a folder may not be looked into
        if not os.path.isfile(path):
            raise DatasetError(f"data.path: expected {expected}, found nothing at {path}")
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
                raise DatasetError(f"data.path: expected {expected}, found nothing at {path}")
            return _datasets(str(path), "load_dataset", str(path))
        train = files["train"]
        test = next((files[n] for n in TEST_SPLITS if files[n]), train)
    splits: Splits = {"train": lambda: read_file(train)}
    if test != train and os.path.isfile(test):
        splits["test"] = lambda: read_file(test)
    return splits


def hub_splits(name: str) -> Splits:
    """Return the splits of a hub dataset, `owner/name` or `owner/name:config`."""
    repository, _, config = name.partition(":")
    config = config or ("main" if repository in ("openai/gsm8k", "gsm8k") else "")
    return _datasets(name, "load_dataset", repository, config or None)


def read_file(path: Path) -> Rows:
    """Yield the rows of a file, read by its ending. Raises DatasetError for a bad or empty file."""
    ending = Path(path.name.removesuffix(".gz")).suffix
    if ending in ARROW:
        loaded = _datasets(str(path), "load_dataset", ARROW[ending], data_files=str(path))
        yield from loaded["train"]()
        return
    readers = {".json": _read_json, **dict.fromkeys(TABLES, _read_table)}
    count = 0
    try:
        for place, fields in readers.get(ending, read_jsonl)(path):
            count += 1
            yield place, fields
    except (OSError, EOFError, UnicodeError, csv.Error) as error:
        why = reason(error)
        raise DatasetError(f"data.path: expected a readable file, got {path}: {why}") from None
    if count == 0:
        raise DatasetError(f"{path}: expected at least one line, the file is empty")


def read_jsonl(path: Path) -> Rows:
    """Yield the lines of a file; blank lines are skipped. Raises DatasetError for bad JSON."""
    if not os.path.isfile(path):
        raise DatasetError(f"data.path: expected a .jsonl file, found nothing at {path}")
    with _open(path) as file:
        for number, raw in enumerate(file, start=1):
            if number == 1:
                raw = raw.removeprefix(BOM_UTF8)
            if raw.strip():
                yield f"{path}:{number}", _parse_json(f"{path}:{number}", raw)


def _read_json(path: Path) -> Rows:
    """Yield the entries of a list, or of the one list that an object holds; else JSON lines."""
    with _open(path) as file:
        raw = file.read().removeprefix(BOM_UTF8)
    try:
        whole = _parse_json(str(path), raw)
    except DatasetError:
        if b"\n" not in raw.strip():
            raise
        yield from read_jsonl(path)
        return
    lists = [x for x in whole.values() if isinstance(x, list)] if isinstance(whole, dict) else []
    rows = whole if isinstance(whole, list) else lists[0] if len(lists) == 1 else [whole]
    for number, fields in enumerate(rows, start=1):
        yield f"{path}[{number}]", fields


def _read_table(path: Path) -> Rows:
    # The csv module keeps texts; pandas, which `datasets` uses, would read 007 as 7 and None as
    # missing.
    csv.field_size_limit(1 << 30)
    delimiter = TABLES[Path(path.name.removesuffix(".gz")).suffix]
    with _open(path) as file:
        text = (line.decode("utf-8-sig" if i == 0 else "utf-8") for i, line in enumerate(file))
        reader = csv.DictReader(text, delimiter=delimiter)
        for fields in reader:
            yield f"{path}:{reader.line_num}", fields


def _open(path: Path) -> Any:
    return gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")


def _parse_json(where: str, raw: bytes) -> Any:
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


def _datasets(source: str, function: str, *arguments: Any, **options: Any) -> Splits:
    """Return the splits that a function of the package `datasets` loads."""
    is_hub = function == "load_dataset" and not os.path.exists(source)
    key = "data.name" if is_hub else "data.path"
    try:
        import datasets
    except ImportError:
        needs = f"{key}: loading {source!r} needs the package `datasets`"
        other = "(pip install 'grpo_fast[train]'); or give data.path a local jsonl"
        raise DatasetError(f"{needs} {other}") from None
    offline = is_hub and hub.is_offline()
    try:
        loaded = getattr(datasets, function)(*arguments, **options)
    except Exception as error:  # offline, no such dataset, a damaged file: one sentence
        place = " from the hub, and no such file or folder exists here" if is_hub else ""
        why = hub.LOCAL if offline else reason(error)
        raise DatasetError(f"{key}: could not load {source!r}{place}: {why}") from error
    every = loaded if isinstance(loaded, dict) else {"train": loaded}

    def rows(split: str) -> Rows:
        for index, fields in enumerate(every[split], start=1):
            # Dates and bytes become texts: rewards in worker processes receive JSON.
            yield f"{source}[{split}]:{index}", json.loads(json.dumps(fields, default=str))

    return {split: functools.partial(rows, split) for split in every}
