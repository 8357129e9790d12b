"""Readers of files, folders, hub datasets and reasoning-gym, which return rows and locations.

Python's json and csv modules read text files, because `datasets` 5.2 changes some of their values:
it turns "2020-01-01" into a timestamp, and rounds integers of more than 19 digits. The package
`datasets` reads parquet, arrow, its own folders and the hub. All rows of a file are in memory at
once.
"""

from __future__ import annotations

import csv
import json
import os
import reprlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from grpo_fast.errors import nearest_hint, reason, require

Row = tuple[str, Any]  # (location such as "file:line", fields)
Rows = list[Row]
Splits = dict[str, Iterator[Row]]  # reading starts when the first row is requested

ARROW = {".parquet": "parquet", ".arrow": "arrow"}
FORMATS = (".jsonl", ".json", ".csv", ".tsv", *ARROW)
GYM = "reasoning_gym:"  # begins the source of a task that the package reasoning-gym generates
GYM_TEST = 1 << 31  # seed of the first held-out item of such a task; training seeds are smaller
TEST_SPLITS = ("test", "validation", "valid", "val", "dev", "eval")
SPLITS = ("train", *TEST_SPLITS)


def read_source(data: Any) -> tuple[Rows, Rows | None]:
    """Read the rows of a source.

    Args:
        data: the section `data` of a configuration.

    Returns:
        The training rows, and the test rows, which are None if the source has no test split.

    Raises:
        ValueError: the source does not exist, is damaged, or has no data.
    """
    source = data.path
    if source.startswith(GYM):
        return gym_rows(source, data.options, data.n_test)
    if is_local(source):
        splits = local_splits(Path(source))
    else:  # owner/name or owner/name:config
        name, _, config = source.partition(":")
        config = config or ("main" if name == "openai/gsm8k" else "")
        splits = _load(source, "load_dataset", name, config or None)
    train = "train" if "train" in splits else next(iter(splits))
    test = next((name for name in TEST_SPLITS if name in splits and name != train), None)
    return list(splits[train]), None if test is None else list(splits[test])


def is_local(source: str) -> bool:
    """Return whether a source is a file or folder rather than a hub id (owner/name)."""
    owner, _, name = source.partition("/")
    is_id = owner and name and "/" not in name and not owner.startswith((".", "~"))
    return not is_id or source.endswith(FORMATS) or os.path.exists(source)


def local_splits(path: Path) -> Splits:
    """Return the splits of a file or folder.

    A single file becomes the split "train". If its name contains "train" and the folder has a file
    of the same name with "test" instead, that file becomes the split "test".

    Raises:
        ValueError: the path does not exist, or the folder has no data.
    """
    if os.path.isfile(path):  # without permission, Path.is_file would raise an error
        files = {"train": path}
        test = path.with_name(path.name.replace("train", "test", 1))
        if test != path and os.path.isfile(test):
            files["test"] = test
    else:
        expected = f"a file with one of the endings {', '.join(FORMATS)}, or a folder with one"
        require(os.path.isdir(path), "data.path", expected, f"nothing at {path}")
        names = [(name, path / f"{name}{end}") for name in SPLITS for end in FORMATS]
        files = {name: file for name, file in names if os.path.isfile(file)}
    if "train" in files:
        return {name: read_file(file) for name, file in files.items()}
    is_saved = any(os.path.isfile(path / name) for name in ("dataset_dict.json", "state.json"))
    return _load(str(path), "load_from_disk" if is_saved else "load_dataset", str(path))


def gym_rows(source: str, options: Mapping[str, Any], n_test: int | None) -> tuple[Rows, Rows]:
    """Return the training rows and the test rows of a task of the package reasoning-gym.

    The package draws item i of a data set from `seed + i`. Two runs therefore share training items
    if their seeds differ by less than `size`. The seeds of test items begin at GYM_TEST in all
    runs. The column `entry` has what the reward `reasoning_gym` needs to score an answer.

    Args:
        source: `reasoning_gym:NAME`.
        options: options of the data set. `size` is the number of training items (500 by default),
            and `seed` is the seed of the first training item (0 by default).
        n_test: number of test items. None means 128.

    Raises:
        ValueError: the package has no such data set or option.
        ModuleNotFoundError: the package is not installed.
    """
    from reasoning_gym.factory import DATASETS, create_dataset

    name = source.removeprefix(GYM)
    hint = nearest_hint(name, DATASETS)
    require(name in DATASETS, "data.path", f"{GYM}NAME of a data set", f"{name!r}{hint}")
    size = options.get("size", 500)
    seed = options.get("seed", 0)
    fits = type(size) is int and type(seed) is int and size > 0 and 0 <= seed <= GYM_TEST - size
    expected = f"a size above 0, and a seed from 0 with seed + size <= {GYM_TEST}"
    require(fits, "data.options", expected, f"size={size!r}, seed={seed!r}")

    both = []
    for count, first in ((size, seed), (n_test or 128, GYM_TEST)):
        chosen = {**options, "size": count, "seed": first}
        try:
            items = create_dataset(name, **chosen)
            made = [_plain({**items[i], "dataset": name, "options": chosen}) for i in range(count)]
        except (TypeError, ValueError, AssertionError) as error:
            why = f"{chosen}: {reason(error)}"
            raise ValueError(f"data.options: expected options of {name}, got {why}") from None
        rows = [{"question": x["question"], "answer": x["answer"], "entry": x} for x in made]
        both.append([(f"{source}[{place}]", row) for place, row in enumerate(rows, start=first)])
    return both[0], both[1]


def read_file(path: Path) -> Iterator[Row]:
    """Yield the rows of a file. The file extension determines the format.

    Raises:
        ValueError: the file is damaged or empty.
    """
    ending = path.suffix.lower()
    expected = f"an unpacked file with one of the endings {', '.join(FORMATS)}"
    require(ending in FORMATS, "data.path", expected, path)
    if ending in ARROW:
        loaded = _load(str(path), "load_dataset", ARROW[ending], data_files=str(path))
        yield from loaded["train"]
        return
    read = _csv_rows if ending in (".csv", ".tsv") else _json_rows
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            rows = list(read(path, file))
    except (UnicodeError, OSError) as error:
        expected = "a readable file of UTF-8 text"
        raise ValueError(f"data.path: expected {expected}, got {path}: {reason(error)}") from None
    require(rows, str(path), "at least one row", "none")
    yield from rows


def _json_rows(path: Path, file: TextIO) -> Iterator[Row]:
    """Yield the rows of JSON lines, or of a list of rows."""
    text = file.read()
    is_list = text.lstrip().startswith("[")
    for number, line in enumerate([text] if is_list else text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:  # bad JSON, deep nesting, 5000-digit numbers
            remedy = "write one object per line, or a list of objects"
            what = f"{path}: not a JSON list" if is_list else f"{path}:{number}: not a JSON object"
            raise ValueError(f"{what} ({error}); {remedy}") from None
        if is_list:
            yield from ((f"{path}[{place}]", row) for place, row in enumerate(value, start=1))
        else:
            yield f"{path}:{number}", value


def _csv_rows(path: Path, file: TextIO) -> Iterator[Row]:
    """Yield the rows of a csv file. All cells are texts, and empty cells are None."""
    csv.field_size_limit(1 << 30)  # the default of 128 KiB is too small for long prompts
    header = file.readline()
    delimiter = "\t" if "\t" in header else max(",;|", key=header.count)
    file.seek(0)
    # Without strict=True, a quote that is never closed would swallow the rest of the file.
    reader = csv.DictReader(file, delimiter=delimiter, strict=True)
    try:
        names = reader.fieldnames = [name.strip() for name in reader.fieldnames or []]
        came = reprlib.repr(names)
        require(len({*names}) == len(names), f"{path}:1", "different names of columns", came)
        for row in reader:
            place = f"{path}:{reader.line_num}"
            fits = None not in row and None not in row.values()
            remedy = f"put a text with {delimiter!r} or a line break in quotes"
            expected = f"{len(names)} fields, as in the first line ({remedy})"
            require(fits, place, expected, reprlib.repr(row))
            yield place, {name: text or None for name, text in row.items()}
    except csv.Error as error:
        remedy = 'end a text in quotes with ", and write "" for a quote in it'
        raise ValueError(f"{path}:{reader.line_num + 1}: not a row ({error}); {remedy}") from None


def _load(source: str, function: str, *arguments: object, **options: object) -> Splits:
    """Return the splits that a function of the package `datasets` loads.

    Args:
        source: the path or hub id, for error messages.
        function: name of the function.
        *arguments: positional arguments of the function.
        **options: keyword arguments of the function.
    """
    import datasets

    try:
        loaded = getattr(datasets, function)(*arguments, **options)
    except Exception as error:  # `datasets` raises many types: offline, unknown name, bad file
        # DatasetGenerationError only says that an error occurred. Its cause says which one.
        is_vague = type(error).__name__ == "DatasetGenerationError"
        why = reason((is_vague and error.__cause__) or error)
        place = "" if os.path.exists(source) else " from the hub, and no such path exists here"
        raise ValueError(f"data.path: could not load {source!r}{place}: {why}") from error
    every = loaded if isinstance(loaded, Mapping) else {"train": loaded}
    return {name: _table_rows(f"{source}[{name}]", table) for name, table in every.items()}


def _table_rows(place: str, table: Iterable[Mapping[str, Any]]) -> Iterator[Row]:
    for index, row in enumerate(table, start=1):
        yield f"{place}:{index}", _plain(row)


def _plain(row: Mapping[str, Any]) -> Any:
    """Convert dates and bytes to text, because worker processes receive the fields as JSON."""
    return json.loads(json.dumps(row, default=str))
