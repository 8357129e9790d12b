"""`key=value` words of a command line, set in nested settings."""

from __future__ import annotations

from typing import Any

from grpo_fast.train.yaml_file import read_yaml


def apply_override(settings: dict[str, Any], override: str) -> None:
    """Set what a word ``key=value`` says in nested settings: a dotted key, a value in YAML.

    Raises ValueError, quoting the word, where it is no such word or its key leads nowhere.
    """
    key, equals, value = override.partition("=")
    if not equals or not key:
        raise ValueError(f"override: expected key=value, came {override!r}")
    set_key(settings, key.split("."), read_yaml(value, key), override)


def set_key(node: Any, keys: list[str], value: Any, override: str) -> None:
    for depth, key in enumerate(keys):
        last = depth == len(keys) - 1
        if isinstance(node, list):
            if not key.isdigit() or int(key) >= len(node):
                raise ValueError(f"override {override!r}: {key!r} is no index of a list of {len(node)}")
            index: Any = int(key)
        elif isinstance(node, dict):
            index = key
        else:
            raise ValueError(f"override {override!r}: {'.'.join(keys[:depth])} holds a value, not a section")
        if last:
            node[index] = value
        else:
            if isinstance(node, dict) and node.get(index) is None:
                node[index] = {}
            node = node[index]
