"""Recipes as nested settings: those shipped in the package by name, others by their file."""

from __future__ import annotations

import os
from importlib import resources
from typing import Any

from grpo_fast.train.explain import nearest
from grpo_fast.train.yaml_file import read_yaml, read_yaml_file


def recipe_names() -> list[str]:
    """The recipes shipped in the package."""
    files = resources.files("grpo_fast") / "recipes"
    return sorted(f.name.removesuffix(".yaml") for f in files.iterdir() if f.name.endswith(".yaml"))


def read_recipe(name_or_path: str) -> Any:
    """What stands in a recipe. Raises ValueError for a name or a file that cannot be read."""
    names = recipe_names()
    if name_or_path in names:
        shipped = resources.files("grpo_fast") / "recipes" / f"{name_or_path}.yaml"
        return read_yaml(shipped.read_text(encoding="utf-8"), f"recipe {name_or_path}")
    if os.path.isfile(name_or_path):
        return read_yaml_file(name_or_path, f"recipe {name_or_path}")
    raise ValueError(
        f"recipe: expected one of {', '.join(names)} or a YAML file, came {name_or_path!r}"
        + nearest(name_or_path, names)
    )
