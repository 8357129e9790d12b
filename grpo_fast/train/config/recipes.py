"""Settings as plain data: recipes, YAML files, `key=value` words, and refusals in one line.

YAML is read strictly: no key twice, no half characters, no exploding aliases.
"""

from __future__ import annotations

import difflib
import os
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from grpo_fast.data import reason
from grpo_fast.train.config import RunConfig

MAX_VALUES = 10_000  # of one document with its aliases written out; a recipe has about a hundred
QUOTED = 200  # characters of a value in a message

Config = TypeVar("Config", bound=BaseModel)
REWARD_MODELS = "reward-model-"  # how the names of their recipes begin

# Other trainers' names whose letters lead elsewhere (learning_rate is most like weight_decay).
ELSEWHERE = {"learning_rate": "lr", "num_generations": "group_size"}


# --------------------------------------------------------------------------------------- recipes
def load_recipe(name_or_path: str, overrides: list[str] | None = None) -> RunConfig:
    """The configuration of a run; see `load_settings`."""
    return load_settings(RunConfig, name_or_path, overrides)


def load_settings(
    kind: type[Config], name_or_path: str, overrides: list[str] | None = None
) -> Config:
    """A recipe of the package (by name) or a YAML file (by path), with ``key=value`` overrides.

    Keys are dotted (``optim.lr=1e-4``, ``rewards.0.weight=2``); values are read as YAML. Raises
    ValueError that names the unknown key and the nearest known one, or the value that does not fit.
    """
    settings = read_recipe(name_or_path, kind)
    if not isinstance(settings, dict):
        came = type(settings).__name__
        raise ValueError(f"recipe {name_or_path}: expected a mapping of keys, came {came}")
    for override in overrides or []:
        apply_override(settings, override)
    return _validated(kind, settings)


def parse_config(settings: dict[str, Any]) -> RunConfig:
    """Validate a plain mapping; every problem becomes one readable line of a ValueError."""
    return _validated(RunConfig, settings)


def _validated(kind: type[Config], settings: dict[str, Any]) -> Config:
    try:
        return kind.model_validate(settings)
    except ValidationError as error:
        lines = ["configuration refused:", *(_explain(e, kind) for e in error.errors())]
        raise ValueError("\n".join(lines)) from None


def save_config(config: BaseModel, path: str | Path) -> None:
    """Write the resolved configuration as YAML that `load_recipe` reads back to an equal one."""
    text = yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
    part = Path(f"{path}.tmp")
    part.write_text(text, encoding="utf-8")
    part.replace(path)


def recipe_names(kind: type[BaseModel] = RunConfig) -> list[str]:
    """The recipes shipped in the package: of runs, or of reward models."""
    files = resources.files("grpo_fast") / "recipes"
    names = (f.name.removesuffix(".yaml") for f in files.iterdir() if f.name.endswith(".yaml"))
    is_run = kind is RunConfig
    return sorted(name for name in names if name.startswith(REWARD_MODELS) != is_run)


def read_recipe(name_or_path: str, kind: type[BaseModel] = RunConfig) -> Any:
    """What stands in a recipe. Raises ValueError for a name or a file that cannot be read."""
    names = recipe_names(kind)
    if name_or_path in names:
        shipped = resources.files("grpo_fast") / "recipes" / f"{name_or_path}.yaml"
        return read_yaml(shipped.read_text(encoding="utf-8"), f"recipe {name_or_path}")
    if os.path.isfile(name_or_path):
        return read_yaml_file(name_or_path, f"recipe {name_or_path}")
    known = f"recipe: expected one of {', '.join(names)} or a YAML file, came {name_or_path!r}"
    raise ValueError(known + nearest(name_or_path, names))


def apply_override(settings: dict[str, Any], override: str) -> None:
    """Set what a word ``key=value`` says in nested settings: a dotted key, a value in YAML.

    Raises ValueError, quoting the word, where it is no such word or its key leads nowhere.
    """
    key, equals, value = override.partition("=")
    if not equals or not key:
        raise ValueError(f"override: expected key=value, came {override!r}")
    set_key(settings, key.split("."), read_yaml(value, key), override)


def set_key(node: Any, keys: list[str], value: Any, override: str) -> None:
    """Set the value at a path of keys, making sections that are not there; see `apply_override`."""
    for depth, key in enumerate(keys):
        index: Any = key
        if isinstance(node, list):
            if not key.isdecimal() or int(key) >= len(node):
                where = f"{key!r} is no index of a list of {len(node)}"
                raise ValueError(f"override {override!r}: {where}")
            index = int(key)
        elif not isinstance(node, dict):
            above = ".".join(keys[:depth])
            raise ValueError(f"override {override!r}: {above} holds a value, not a section")
        if depth == len(keys) - 1:
            node[index] = value
        else:
            if isinstance(node, dict) and node.get(index) is None:
                node[index] = {}
            node = node[index]


# ------------------------------------------------------------------------------------------ YAML
class _StrictLoader(yaml.SafeLoader):
    def get_single_node(self) -> Any:
        root = super().get_single_node()
        if root is not None and _check(root, {}) > MAX_VALUES:
            raise ValueError(f"its aliases make more than {MAX_VALUES} values of it")
        return root


def _check(node: yaml.Node, sizes: dict[int, int]) -> int:
    """How many values `node` holds, aliases written out. Raises ValueError for what must not be."""
    if id(node) in sizes:
        return sizes[id(node)]
    sizes[id(node)] = MAX_VALUES  # while it is open: a node inside itself has no end
    if isinstance(node, yaml.ScalarNode):
        if any("\ud800" <= character <= "\udfff" for character in node.value):
            raise ValueError(f"a lone surrogate is no character{node.start_mark}")
        children: list[yaml.Node] = []
    elif isinstance(node, yaml.MappingNode):
        _refuse_repeated(node)
        children = [child for pair in node.value for child in pair]
    else:
        children = node.value
    sizes[id(node)] = 1 + sum(_check(child, sizes) for child in children)
    return sizes[id(node)]


def _refuse_repeated(mapping: yaml.MappingNode) -> None:
    seen = set()
    for key in (key for key, _ in mapping.value if isinstance(key, yaml.ScalarNode)):
        if (key.tag, key.value) in seen:
            raise ValueError(f"the key {key.value!r} is there twice{key.start_mark}")
        seen.add((key.tag, key.value))


def read_yaml(text: str, name: str) -> Any:
    """Plain data from YAML. Raises ValueError, naming what was read, for anything else."""
    try:
        return _StrictLoader(text).get_single_data()
    # Not YAMLError alone: a scalar that only looks like a date, say, raises what its parser met.
    except Exception as error:
        start = repr(text[:60])
        raise ValueError(f"{name}: expected plain YAML, got {start}: {reason(error)}") from None


def read_yaml_file(path: str | Path, name: str) -> Any:
    """The same from a file."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{name}: expected a readable text file in UTF-8, got {error}") from None
    return read_yaml(text, name)


# -------------------------------------------------------------------------------------- refusals
def _explain(error: Any, kind: type[BaseModel]) -> str:
    """One of a ValidationError's errors in an indented line."""
    path = [p for p in error["loc"] if not (isinstance(p, str) and p.endswith("Config]"))]
    where = ".".join(str(p) for p in path)
    if error["type"] == "extra_forbidden":
        return f"  {where}: unknown key" + nearest(str(path[-1]), _known_keys(path[:-1], kind))
    if error["type"] == "missing":
        return f"  {where}: is missing"
    message = error["msg"].removeprefix("Value error, ")
    is_section = isinstance(error["input"], (dict, BaseModel))
    came = "" if is_section else f", came {quoted(error['input'])}"
    return f"  {where}: {message}{came}" if where else f"  {message}"


def _known_keys(path: list[Any], kind: type[BaseModel]) -> list[str]:
    section: Any = kind
    for part in path:
        if not isinstance(part, int):
            section = _section_of(section.model_fields[part].annotation)
    return list(section.model_fields)


def _section_of(annotation: Any) -> Any:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(filter(None, map(_section_of, getattr(annotation, "__args__", ()))), None)


def nearest(key: str, known: list[str]) -> str:
    """The end of a refusal: the name most like `key`, or all of them."""
    if ELSEWHERE.get(key) in known:
        return f"; nearest: {ELSEWHERE[key]}"
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.4)
    return f"; nearest: {close[0]}" if close else f"; known: {', '.join(known)}"


def quoted(value: Any) -> str:
    """A value as a message shows it, however long it is."""
    text = repr(value)
    return text if len(text) <= QUOTED else f"{text[:QUOTED]}… ({len(text)} characters)"
