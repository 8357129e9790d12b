"""Functions that load recipes.

A recipe is a YAML file with settings of a run. It is part of the package or written by the user.
Relative paths in a recipe start from the working folder.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from importlib import resources
from pathlib import Path
from typing import Any

from grpo_fast.errors import nearest_hint, require
from grpo_fast.train.config import RunConfig
from grpo_fast.train.config.words import quoted, read_words, read_yaml

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
        settings = read_yaml(Path(name_or_path), where)
    elif name_or_path.endswith((".yaml", ".yml")) or os.sep in name_or_path:
        raise ValueError(f"recipe: no such file: {quoted(name_or_path)}")
    else:
        came = f"{quoted(name_or_path)}{nearest_hint(name_or_path, names)}"
        raise ValueError(f"recipe: expected one of {', '.join(names)} or a YAML file, got {came}")
    require(isinstance(settings, dict), where, "a mapping of keys", type(settings).__name__)
    return settings
