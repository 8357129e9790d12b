"""Strict YAML 1.2 reader and writer, without aliases and repeated keys."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from grpo_fast.data import reason

DEEPEST = 64  # most levels of nested lists and mappings; far below Python's recursion limit
# PyYAML follows YAML 1.1, which reads 1e-6 as text, 010 as 8 and 1:30 as 90. These patterns replace
# PyYAML's number formats with the number formats of YAML 1.2.
INTEGER = re.compile(r"\A[-+]?(0|[1-9][0-9]*)$")
REAL = re.compile(
    r"\A(?:[-+]?(\.[0-9]+|[0-9]+\.[0-9]*|[0-9]+(?=[eE]))([eE][-+]?[0-9]+)?"
    r"|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN))$"
)
NUMBERS = {"tag:yaml.org,2002:int": INTEGER, "tag:yaml.org,2002:float": REAL}


class _StrictLoader(yaml.SafeLoader):
    """YAML loader that rejects aliases, repeated keys, lone surrogates and deep nesting."""

    depth = 0
    yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in pairs if tag not in NUMBERS]
        for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def compose_node(self, parent: Any, index: Any) -> Any:
        # Reject aliases, because nested aliases can expand 400 bytes to a billion values.
        if self.check_event(yaml.AliasEvent):
            raise ValueError("aliases (*name) are not supported: repeat the value")
        self.depth += 1
        if self.depth > DEEPEST:
            raise ValueError(f"expected at most {DEEPEST} levels of lists and mappings")
        node: Any = super().compose_node(parent, index)
        self.depth -= 1
        _check(node)
        return node


class _Dumper(yaml.SafeDumper):
    """YAML dumper that quotes strings which the loader would read as numbers."""

    def ignore_aliases(self, data: Any) -> bool:
        return True  # the loader refuses aliases


for _tag, _pattern in NUMBERS.items():
    for _class in (_StrictLoader, _Dumper):
        _class.add_implicit_resolver(_tag, _pattern, list("-+.0123456789"))


def _check(node: Any) -> None:
    """Raise a ValueError if a mapping repeats a key or a text contains a lone surrogate.

    A lone surrogate cannot be written to a UTF-8 file.
    """
    if isinstance(node, yaml.ScalarNode):
        if any("\ud800" <= character <= "\udfff" for character in node.value):
            raise ValueError(f"a lone surrogate is not a character{node.start_mark}")
    elif isinstance(node, yaml.MappingNode):
        keys = [key for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        seen = set()
        for key in keys:
            if (key.tag, key.value) in seen:
                raise ValueError(f"the key {key.value!r} appears twice{key.start_mark}")
            seen.add((key.tag, key.value))


def read_yaml(text: str, name: str) -> Any:
    """Return the data of a YAML text.

    Args:
        text: the YAML text.
        name: name of the text, such as its path. Error messages begin with the name.

    Raises:
        ValueError: the text is not strict YAML.
    """
    try:
        return _StrictLoader(text).get_single_data()
    # PyYAML's constructors raise many exception classes. For example, a malformed date raises a
    # ValueError from datetime.
    except Exception as error:
        start = repr(text[:60])
        raise ValueError(f"{name}: expected plain YAML, got {start}: {reason(error)}") from None


def read_yaml_file(path: str | Path, name: str) -> Any:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{name}: expected a readable text file in UTF-8, got {error}") from None
    return read_yaml(text, name)


def write_yaml(data: Any, path: str | Path) -> None:
    """Write data as YAML and replace the file atomically, so that no reader sees a partial file."""
    text = yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True)
    part = Path(f"{path}.tmp")
    part.write_text(text, encoding="utf-8")
    part.replace(path)
