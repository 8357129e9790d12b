"""Functions that load recipes, and that convert configurations of other libraries.

A recipe is a YAML file with settings of a run. It is part of the package or written by the user.
Relative paths in a recipe start from the working folder.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Iterable
from importlib import resources
from pathlib import Path
from typing import Any

from grpo_fast.errors import nearest_hint, require
from grpo_fast.train.config import RunConfig
from grpo_fast.train.config.words import (
    dotted_keys,
    flat,
    other_names,
    quoted,
    read_words,
    read_yaml,
    read_yaml_file,
)

RECIPES = resources.files("grpo_fast") / "recipes"


def load_recipe(name_or_path: str, words: Iterable[str] = ()) -> RunConfig:
    """Return the configuration of a recipe.

    Args:
        name_or_path: name of a recipe of the package, or path of a YAML file.
        words: changes such as ``optim.lr=1e-4``.

    Raises:
        ValueError: the recipe does not exist or cannot be read, or a setting is invalid.
    """
    return read_words(RunConfig, words, read_recipe(name_or_path))


def load_saved(path: Path) -> RunConfig:
    """Return the configuration that a run saved in a file.

    Raises:
        ValueError: the file cannot be read. A different version of the package may have written it.
    """
    try:
        return load_recipe(str(path))
    except ValueError as error:
        error.add_note(f"if another version of grpo_fast wrote {path}, use that version")
        raise


def recipe_names() -> list[str]:
    """Return the sorted names of the recipes in the package."""
    return sorted(f.name[:-5] for f in RECIPES.iterdir() if f.name.endswith(".yaml"))


def recipe_table() -> list[list[str]]:
    """Return the command, subject, size, time and requirements of each recipe in the package.

    The first line of a recipe's file contains these values except the command, separated by ` · `.
    """
    table = []
    for name in recipe_names():
        text = (RECIPES / f"{name}.yaml").read_text("utf-8")
        first = text.partition("\n")[0].removeprefix("# ")
        table.append([f"train {name}", *first.split(" · ")])
    return table


def read_recipe(name_or_path: str) -> dict[str, Any]:
    """Return the nested settings of a recipe.

    Args:
        name_or_path: name of a recipe of the package, or path of a YAML file.

    Raises:
        ValueError: the recipe does not exist or cannot be read.
    """
    where, names = f"recipe {name_or_path}", recipe_names()
    # The name of a recipe takes precedence over a file of the same name in the working folder.
    if name_or_path in names:
        settings = read_yaml((RECIPES / f"{name_or_path}.yaml").read_text("utf-8"), where)
    elif os.path.isfile(name_or_path):
        settings = read_yaml_file(name_or_path, where)
    elif name_or_path.endswith((".yaml", ".yml")) or os.sep in name_or_path:
        raise ValueError(f"recipe: no such file: {quoted(name_or_path)}")
    else:
        came = f"{quoted(name_or_path)}{nearest_hint(name_or_path, names)}"
        raise ValueError(f"recipe: expected one of {', '.join(names)} or a YAML file, got {came}")
    require(isinstance(settings, dict), where, "a mapping of keys", type(settings).__name__)
    return settings


# --------------------------------------------------------------- Configurations of other libraries
# A text that YAML reads as a text without quotes.
PLAIN_TEXT = re.compile(r"(?!(true|false|null)$)[a-z~./][a-z0-9_./-]+", re.I)


def converted(path: str) -> list[str]:
    """Return the settings of a configuration of TRL, verl or OpenRLHF as words of this package.

    Args:
        path: a YAML or JSON file, such as `GRPOConfig.to_json_string()` or verl's ppo_trainer.yaml.

    Returns:
        One quoted word `key=value` per line, and then comments with the settings that have no
        counterpart, or whose counterpart counts something else.

    Raises:
        ValueError: the file is not a mapping in YAML or JSON.
    """
    theirs = read_yaml_file(path, path)
    require(isinstance(theirs, dict), path, "a mapping of keys", type(theirs).__name__)
    settings = dict(flat(theirs))
    words: dict[str, str] = {}
    others: list[str] = []
    for name, value in settings.items():
        above, _, last = name.rpartition(".")
        text = str(value).lower() if isinstance(value, bool) else str(value)
        ours, by_value = _counterpart(name, text)
        # 1. Leave out what is off, and what the other library computes.
        is_off = value in (None, False, "", "no", "none", "???", [], {}) and not by_value
        if is_off or "${" in text or last.startswith("_"):
            continue
        # 2. Keep the word if the configuration accepts its value.
        is_plain = isinstance(value, str) and PLAIN_TEXT.fullmatch(text)
        word = ours if "=" in ours else f"{ours}={text if is_plain else json.dumps(value)}"
        why = f"see {ours[:-1]}" if ours.endswith("?") else _refusal(word) if ours else ""
        if last.startswith("kl_loss") and settings.get(f"{above}.use_kl_loss") is False:
            why = "use_kl_loss is off"
        if ours and not why:
            words[word.partition("=")[0]] = word
        else:
            others.append(f"# not expressed: {name}={text}" + f" ({why})" * bool(why))
    if float(words.get("loss.beta", "=0").partition("=")[2]):
        words.setdefault("reference.kind", "reference.kind=frozen")
    if words.get("advantages") != "advantages=gae":  # only gae reads a critic
        words = {key: word for key, word in words.items() if not key.startswith("critic.")}
    return [*map(shlex.quote, words.values()), *others]


def _counterpart(name: str, text: str) -> tuple[str, bool]:
    """Return our key for a setting of another library, and True if the table names its value.

    A key with three or more parts must be in the table with its full name, because another section,
    such as verl's critic, may have a key of the same last name.
    """
    names = other_names()
    last = name.rpartition(".")[2]
    short = last if name.count(".") < 2 else name
    by_value = names.get(f"{name}={text}") or names.get(f"{short}={text}")
    same = [key for key in dotted_keys(RunConfig) if key.rpartition(".")[2] == short]
    ours = by_value or names.get(name) or names.get(short, same[0] if len(same) == 1 else "")
    if not ours and names.get(last, "").endswith("?"):
        ours = names[last]
    return ours, bool(by_value)


def _refusal(word: str) -> str:
    """Return why a run refuses the value of a single word, or "" if it accepts the value."""
    key = word.partition("=")[0]
    try:
        load_recipe("own-data", [word])
    except ValueError as error:
        text = str(error)  # a conflict with another setting has a different beginning
        return text.removeprefix(f"{key}: ") if text.startswith(f"{key}: ") else ""
    return ""
