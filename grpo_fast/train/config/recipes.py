"""Recipes: the configurations shipped in the package, and YAML files like them."""

from __future__ import annotations

import os
from collections.abc import Iterable
from importlib import resources
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from grpo_fast.errors import nearest_name
from grpo_fast.train.config import RunConfig, require
from grpo_fast.train.config.plain import read_yaml, read_yaml_file, write_yaml
from grpo_fast.train.config.words import Config, quoted, read_words

RECIPES = resources.files("grpo_fast") / "recipes"
REWARD_MODELS = "reward-model-"  # how the names of their recipes begin
CONVENTIONS = ("trl", "verl", "openrlhf")  # keys of a reward section that hold a function


def load_recipe(name_or_path: str, words: Iterable[str] = ()) -> RunConfig:
    return load_settings(RunConfig, name_or_path, words)


def load_settings(
    kind: type[Config], name_or_path: str, words: Iterable[str] = (), also: Iterable[str] = ()
) -> Config:
    """A recipe of the package (by name) or a YAML file (by path), changed by words ``key=value``.

    Raises ValueError for a name or file that cannot be read, and as `read_words`.
    """
    return read_words(kind, words, read_recipe(name_or_path, kind), also)


def save_config(config: BaseModel, path: str | Path) -> None:
    """Write the resolved configuration as YAML that `load_recipe` reads back to an equal one."""
    write_yaml(config.model_dump(mode="json"), path)


def recipe_names(kind: type[BaseModel] = RunConfig) -> list[str]:
    """The recipes shipped in the package: of runs, or of reward models."""
    is_run = kind is RunConfig
    return [name for name in _shipped() if name.startswith(REWARD_MODELS) != is_run]


def recipe_table() -> list[list[str]]:
    """For each shipped recipe its command, what it trains, its size, its time and what it needs."""
    table = []
    for name in _shipped():
        command = "reward-model" if name.startswith(REWARD_MODELS) else "train"
        text = (RECIPES / f"{name}.yaml").read_text("utf-8")
        first = text.partition("\n")[0].removeprefix("# ")
        table.append([f"{command} {name}", *first.split(" · ")])
    return table


def read_recipe(name_or_path: str, kind: type[BaseModel] = RunConfig) -> dict[str, Any]:
    """The plain settings of a recipe. Raises ValueError for a name or file that is none."""
    where, names = f"recipe {name_or_path}", recipe_names(kind)
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
        came = f"{quoted(name_or_path)}{_nearest_recipe(name_or_path, names)}"
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


def _shipped() -> list[str]:
    return sorted(f.name[:-5] for f in RECIPES.iterdir() if f.name.endswith(".yaml"))


def _nearest_recipe(name: str, own: list[str]) -> str:
    close = nearest_name(name, _shipped())
    if close is None or close in own:
        return f"; nearest: {close}" if close else ""
    command = "reward-model" if close.startswith(REWARD_MODELS) else "train"
    return f"; nearest: grpo-fast {command} {close}"
