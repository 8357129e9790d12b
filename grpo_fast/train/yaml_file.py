"""YAML as plain data, read strictly: no key twice, no half characters, no exploding aliases."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from grpo_fast.train.explain import reason

MAX_VALUES = 10_000  # of one document with its aliases written out; a recipe has about a hundred


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
