"""Recipes: the configurations shipped in the package, and YAML files like them."""

from __future__ import annotations

import os
from collections.abc import Iterable
from importlib import resources
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from grpo_fast.errors import nearest_name
from grpo_fast.rewards.conventions import CONVENTIONS
from grpo_fast.train.config import RunConfig, require
from grpo_fast.train.config.plain import read_yaml, read_yaml_file, write_yaml
from grpo_fast.train.config.words import Config, quoted, read_words

RECIPES = resources.files("grpo_fast") / "recipes"
# Recipes that became scripts.
MOVED = {
    "lecture": "python -m grpo_fast.examples.lecture",
    "lecture-naive": "python -m grpo_fast.examples.lecture --naive",
    "reward-model-sort": "python -m grpo_fast.examples.reward_model",
}


def load_recipe(name_or_path: str, words: Iterable[str] = ()) -> RunConfig:
    return load_settings(RunConfig, name_or_path, words)


def load_settings(
    kind: type[Config], name_or_path: str, words: Iterable[str] = (), also: Iterable[str] = ()
) -> Config:
    """A recipe of the package (by name) or a YAML file (by path), changed by words ``key=value``.

    Raises ValueError for a name or file that cannot be read, and as `read_words`.
    """
    return read_words(kind, words, read_recipe(name_or_path), also)


def save_config(config: BaseModel, path: str | Path) -> None:
    """Write the resolved configuration as YAML that `load_recipe` reads back to an equal one."""
    write_yaml(config.model_dump(mode="json"), path)


def recipe_names() -> list[str]:
    """Return the names of the recipes shipped in the package."""
    return sorted(f.name[:-5] for f in RECIPES.iterdir() if f.name.endswith(".yaml"))


def recipe_table() -> list[list[str]]:
    """For each shipped recipe its command, what it trains, its size, its time and what it needs."""
    table = []
    for name in recipe_names():
        text = (RECIPES / f"{name}.yaml").read_text("utf-8")
        first = text.partition("\n")[0].removeprefix("# ")
        table.append([f"train {name}", *first.split(" · ")])
    return table


def read_recipe(name_or_path: str) -> dict[str, Any]:
    """The plain settings of a recipe. Raises ValueError for a name or file that is none."""
    where, names = f"recipe {name_or_path}", recipe_names()
    if name_or_path in names:
        settings = read_yaml((RECIPES / f"{name_or_path}.yaml").read_text("utf-8"), where)
    elif os.path.isfile(name_or_path):
        folder = os.path.dirname(name_or_path)
        settings = _resolved(read_yaml_file(name_or_path, where), folder)
    elif name_or_path.casefold().endswith((".yaml", ".yml")) or (
        os.sep in name_or_path and not os.path.exists(name_or_path)
    ):
        raise ValueError(f"recipe: no such file: {quoted(name_or_path)}")
    else:
        close = nearest_name(name_or_path, [*names, *MOVED])
        hint = f"; nearest: {MOVED.get(close, close)}" if close else ""
        came = f"{quoted(name_or_path)}{hint}"
        raise ValueError(f"recipe: expected one of {', '.join(names)} or a YAML file, got {came}")
    require(isinstance(settings, dict), where, "a mapping of keys", type(settings).__name__)
    return settings


def _resolved(value: Any, folder: str, key: str = "") -> Any:
    """Return settings whose paths to files in the recipe's folder begin with that folder.

    A path that does not exist there stays as it is: it may be a hub id, or relative to the
    working folder.
    """
    if isinstance(value, dict):
        return {name: _resolved(item, folder, str(name)) for name, item in value.items()}
    if isinstance(value, list):
        return [_resolved(item, folder, key) for item in value]
    is_code = key in ("rewards", "name", *CONVENTIONS) and ".py:" in str(value)
    if not isinstance(value, str) or not (is_code or key in ("path", "teacher", "resume")):
        return value
    path, colon, function = value.rpartition(":") if is_code else (value, "", "")
    inside = os.path.join(folder, os.path.expanduser(path))
    return inside + colon + function if os.path.exists(inside) else value
