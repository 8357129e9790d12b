"""Readers of files, folders, hub datasets and reasoning-gym, which return rows and locations.

The package `datasets` reads parquet, arrow, its own folders and the hub. Python's json and csv
modules read text files, because `datasets` 5.2 changes some of their values: it turns "2020-01-01"
into a timestamp, rounds integers of more than 19 digits, and shifts the columns of a csv file whose
rows end with a delimiter. All rows of a file are in memory at once.
"""

from __future__ import annotations

import codecs
import csv
import functools
import gzip
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from grpo_fast.data import hub, reason
from grpo_fast.errors import nearest_hint, require

Rows = list[tuple[str, Any]]  # (location such as "file:line", fields)
Splits = dict[str, Callable[[], Rows]]  # split name -> function that reads its rows

TABLES = {".csv": ",", ".tsv": "\t"}  # file extension -> usual delimiter
ARROW = {".parquet": "parquet", ".arrow": "arrow"}
FORMATS = (".jsonl", ".ndjson", ".json", *TABLES, *ARROW)
GYM = "reasoning_gym:"  # begins the source of a task that the package reasoning-gym generates
GYM_TEST = 1 << 31  # seed of the first held-out item of such a task; training seeds are smaller
GYM_SIZES = {"train": 500, "test": 128}  # usual numbers of items
TEST_SPLITS = ("test", "validation", "valid", "val", "dev", "eval")
# A csv column has a type if all its cells have the form of the type. A column with 007 or with a
# number of more than 18 digits stays text, because such numbers are usually ids.
TYPES: dict[Callable[[str], Any], re.Pattern[str]] = {
    int: re.compile(r"-?(0|[1-9][0-9]{0,17})"),
    float: re.compile(r"-?(0|[1-9][0-9]{0,14})(\.[0-9]+)?([eE][-+]?[0-9]{1,2})?"),
    "True".__eq__: re.compile("True|False"),
}


def is_local(source: str) -> bool:
    """Return whether a source is a file or folder rather than a hub id (owner/name)."""
    owner, _, name = source.partition("/")
    is_id = owner and name and "/" not in name and not owner.startswith((".", "~"))
    is_file = source.removesuffix(".gz").endswith(FORMATS)
    return not is_id or is_file or os.path.exists(source)


def local_splits(path: Path, encoding: str | None = None) -> Splits:
    """Return the splits of a file or folder.

    A single file becomes the split "train". If its name contains "train" and the folder has a file
    of the same name with "test" instead, that file becomes the split "test".

    Raises:
        ValueError: the path does not exist, or the folder has no data.
    """
    expected = "a .jsonl, .json, .csv, .tsv or .parquet file (or .gz), or a folder with train.jsonl"
    missing = f"data.path: expected {expected}, found nothing at {path}"
    if os.path.isdir(path):  # without permission, Path.is_dir would raise an error
        if os.path.isfile(path / "dataset_dict.json") or os.path.isfile(path / "state.json"):
            return _datasets(str(path), "load_from_disk", str(path))
        ends = [f"{ending}{zipped}" for ending in FORMATS for zipped in ("", ".gz")]
        named = {name: [path / f"{name}{end}" for end in ends] for name in ("train", *TEST_SPLITS)}
        found = {name: next(filter(os.path.isfile, files), None) for name, files in named.items()}
        if found["train"] is None:
            inside = (*path.glob("*"), *path.glob("*/*"))
            if not any(file.suffix in (*FORMATS, ".gz") for file in inside):
                raise ValueError(missing)
            return _datasets(str(path), "load_dataset", str(path))
    elif os.path.isfile(path):
        test = path.with_name(path.name.replace("train", "test", 1))
        found = {"train": path, "test": test if test != path and os.path.isfile(test) else None}
    else:
        raise ValueError(missing)
    files = {name: file for name, file in found.items() if file is not None}
    return {name: functools.partial(read_file, file, encoding) for name, file in files.items()}


def hub_splits(name: str) -> Splits:
    """Return the splits of a hub dataset.

    Args:
        name: `owner/name`, or `owner/name:config`.
    """
    repository, _, config = name.partition(":")
    config = config or ("main" if repository == "openai/gsm8k" else "")
    return _datasets(name, "load_dataset", repository, config or None)


def gym_splits(source: str, options: Mapping[str, Any], n_test: int | None) -> Splits:
    """Return the splits of a task of the package reasoning-gym.

    The package draws item i of a data set from `seed + i`. Two runs therefore share training items
    if their seeds differ by less than `size`. The seeds of test items begin at GYM_TEST in all
    runs. The column `entry` has what the reward `reasoning_gym` needs to score an answer.

    Args:
        source: `reasoning_gym:NAME`.
        options: options of the data set. `size` is the number of training items (500 by default),
            and `seed` is the seed of the first training item (0 by default).
        n_test: number of test items. None means 128.

    Raises:
        ValueError: the package is not installed, or has no such data set or option.
    """
    name = source.removeprefix(GYM)
    try:
        from reasoning_gym.factory import DATASETS, create_dataset
    except ImportError as error:
        remedy = "pip install 'grpo_fast[gym]'"
        came = f"{reason(error)} ({remedy})"
        raise ValueError(f"data.path: {source} needs the package reasoning-gym: {came}") from None
    hint = nearest_hint(name, DATASETS)
    require(name in DATASETS, "data.path", f"{GYM}NAME of a data set", f"{name!r}{hint}")
    size = options.get("size", GYM_SIZES["train"])
    seed = options.get("seed", 0)
    fits = type(size) is int and type(seed) is int and size > 0 and 0 <= seed <= GYM_TEST - size
    expected = f"a size above 0, and a seed from 0 with seed + size <= {GYM_TEST}"
    require(fits, "data.options", expected, f"size={size!r}, seed={seed!r}")

    def rows(size: int, seed: int) -> Rows:
        chosen = {**options, "size": size, "seed": seed}
        try:
            items = create_dataset(name, **chosen)
            made = [items[index] for index in range(size)]
        except (TypeError, ValueError, AssertionError) as error:
            expected = f"options of {name}"
            raise ValueError(
                f"data.options: expected {expected}, got {chosen}: {reason(error)}"
            ) from None
        listed = []
        for place, item in enumerate(made, start=seed):
            scored = {**item, "dataset": name, "options": chosen}
            entry = json.loads(json.dumps(scored, default=str))  # a worker process receives JSON
            row = {"question": item["question"], "answer": item["answer"], "entry": entry}
            listed.append((f"{source}[{place}]", row))
        return listed

    return {
        "train": functools.partial(rows, size, seed),
        "test": functools.partial(rows, n_test or GYM_SIZES["test"], GYM_TEST),
    }


def read_file(path: Path, encoding: str | None = None) -> Rows:
    """Return the rows of a file. The file extension determines the format.

    Args:
        path: the file.
        encoding: encoding of a text file. None reads UTF-8, or UTF-16 after a byte order mark.

    Raises:
        ValueError: the file is damaged or empty.
    """
    ending = Path(path.name.removesuffix(".gz")).suffix.lower()
    expected = f"a file with one of the endings {', '.join(FORMATS)}, or one of them and .gz"
    require(ending in ("", *FORMATS), "data.path", expected, path)
    if ending in ARROW:
        loaded = _datasets(str(path), "load_dataset", ARROW[ending], data_files=str(path))
        return loaded["train"]()
    try:
        lines = list(_lines(path, encoding))
    except (OSError, EOFError, UnicodeError, LookupError) as error:
        why = reason(error)
        raise ValueError(f"data.path: expected a readable file, got {path}: {why}") from None
    if ending in TABLES:
        rows = _read_table(path, lines, TABLES[ending])
    else:
        rows = _read_json(path, lines)
    if not rows:
        raise ValueError(f"{path}: expected at least one line, the file is empty")
    return rows


def _lines(path: Path, encoding: str | None) -> Iterator[str]:
    """Yield the lines of a text file. Refuse a byte that the encoding does not allow."""
    opened: Any = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rb") as file:
        start = file.read(2)
    is_wide = start in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
    encoding = encoding or ("utf-16" if is_wide else "utf-8-sig")
    with opened(path, "rt", encoding=encoding, errors="surrogateescape", newline="") as file:
        for number, line in enumerate(file, start=1):
            bad = re.search("[\udc80-\udcff]", line)  # surrogateescape writes bad bytes like this
            if bad is not None:
                came = f"byte 0x{ord(bad[0]) - 0xDC00:02x}"
                remedy = "data.encoding=cp1252 reads old files of Excel"
                raise ValueError(f"{path}:{number}: not UTF-8 text ({came}); {remedy}")
            yield line


def _read_json(path: Path, lines: list[str]) -> Rows:
    """Return the rows of JSON lines, of a list of rows, or of one object."""
    first = next((line for line in lines if line.strip()), "")
    if first.lstrip().startswith("{") and first.rstrip().endswith("}"):
        texts = [(f"{path}:{n}", line) for n, line in enumerate(lines, 1) if line.strip()]
        rows = [(place, _parse_json(place, line)) for place, line in texts]
        content = rows[0][1]
        if len(rows) > 1 or path.name.removesuffix(".gz").endswith("l"):
            return rows
    elif first:
        content = _parse_json(str(path), "".join(lines))
    else:
        return []
    return [(f"{path}[{n}]", fields) for n, fields in enumerate(_rows_of(content), start=1)]


def _rows_of(content: Any) -> list[Any]:
    """Return the rows of a parsed JSON value.

    The items of a list are its rows. An object contains its rows as columns (which pandas writes)
    or as its only list of objects. Any other object is a single row.
    """
    if not isinstance(content, dict):
        return content if isinstance(content, list) else [content]
    lists = [x for x in content.values() if isinstance(x, list) and x]
    # Messages and choices are lists, too, but they are columns of a single row.
    marks = {"role", "from", "label"}
    if any(isinstance(x[0], dict) and marks & {*x[0]} for x in lists):
        return [content]
    # pandas writes a column as a list, or as an object with the numbers of the rows as keys.
    columns = [
        [*x.values()] if isinstance(x, dict) and [*x] == [*map(str, range(len(x)))] else x
        for x in content.values()
    ]
    are_lists = len(columns) > 1 and all(isinstance(x, list) and len(x) > 1 for x in columns)
    if are_lists and len({*map(len, columns)}) == 1:
        return [dict(zip(content, row, strict=True)) for row in zip(*columns, strict=True)]
    are_rows = len(lists) == 1 and isinstance(lists[0][0], dict)
    return lists[0] if are_rows else [content]


def _parse_json(where: str, text: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_unique_keys)
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


def _read_table(path: Path, lines: list[str], usual: str) -> Rows:
    """Return the rows of a csv or tsv file, with columns of a type. Empty cells are None."""
    csv.field_size_limit(1 << 30)  # the default of 128 KiB is too small for long prompts
    header = lines[0] if lines else ""
    delimiter = next((mark for mark in (usual, ";", "\t", ",", "|") if mark in header), usual)
    # Without strict=True, a quote that is never closed would swallow the rest of the file.
    reader = csv.reader(lines, delimiter=delimiter, strict=True)
    rows: Rows = []
    last = 0  # last line of the previous row
    try:
        names = [name.strip() for name in next(reader, [])]
        last = reader.line_num
        require(len({*names}) == len(names), f"{path}:1", "different names of columns", names)
        for cells in reader:
            extra = cells[len(names) :]  # empty ones come from delimiters at the end of a line
            if cells:
                expected = f"{len(names)} fields, as in the first line"
                came = f"{len(cells)}; put a text with {delimiter!r} or a line break in quotes"
                fits = len(cells) >= len(names) and not any(extra)
                require(fits, f"{path}:{reader.line_num}", expected, came)
                rows.append((f"{path}:{reader.line_num}", dict(zip(names, cells, strict=False))))
            last = reader.line_num
    except csv.Error as error:
        remedy = 'end a text in quotes with ", and write "" for a quote in it'
        raise ValueError(f"{path}:{last + 1}: not a row ({error}); {remedy}") from None
    for name in names:
        cells = [row[name] for _, row in rows if row[name]]
        kind = next((k for k, form in TYPES.items() if all(map(form.fullmatch, cells))), str)
        for _, row in rows:
            row[name] = kind(row[name]) if row[name] else None
    return rows


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
    every = loaded if isinstance(loaded, Mapping) else {"train": loaded}

    def rows(split: str) -> Rows:
        # Convert dates and bytes to text, because worker processes receive the fields as JSON.
        plain = [json.loads(json.dumps(fields, default=str)) for fields in every[split]]
        return [(f"{source}[{split}]:{index}", row) for index, row in enumerate(plain, start=1)]

    return {split: functools.partial(rows, split) for split in every}
