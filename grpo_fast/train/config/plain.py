"""Plain data from YAML, read strictly: no key twice, no half characters, no exploding aliases."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from grpo_fast.data import reason

MAX_VALUES = 10_000  # of one document with its aliases written out; a recipe has about a hundred
DEEPEST = 64  # lists and mappings inside each other
# As YAML 1.2 has them: 1e-6 is a number, 010 is not 8 and 1:30 is not 90, as in 1.1.
INTEGER = re.compile(r"\A[-+]?(0|[1-9][0-9]*)$")
REAL = re.compile(
    r"\A(?:[-+]?(\.[0-9]+|[0-9]+\.[0-9]*|[0-9]+(?=[eE]))([eE][-+]?[0-9]+)?"
    r"|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN))$"
)
NUMBERS = {"tag:yaml.org,2002:int": INTEGER, "tag:yaml.org,2002:float": REAL}


class _StrictLoader(yaml.SafeLoader):
    """Counts the nodes of a document while it composes them, before anything is made of them."""

    values = depth = 0
    yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in pairs if tag not in NUMBERS]
        for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def compose_node(self, parent: Any, index: Any) -> Any:
        is_alias, before = self.check_event(yaml.AliasEvent), self.values
        self.depth += 1
        if self.depth > DEEPEST:
            raise ValueError(f"expected at most {DEEPEST} levels of lists and mappings")
        node: Any = super().compose_node(parent, index)
        self.depth -= 1
        # An alias costs what it stands for. A node inside itself is not counted yet: it has no end.
        self.values += getattr(node, "values", MAX_VALUES) if is_alias else 1
        if self.values > MAX_VALUES:
            raise ValueError(f"it has more than {MAX_VALUES} values, its aliases written out")
        if not is_alias:
            node.values = self.values - before
            _check(node)
        return node


class _Dumper(yaml.SafeDumper):
    """Quotes the strings that the loader would take for numbers."""


for _tag, _pattern in NUMBERS.items():
    for _class in (_StrictLoader, _Dumper):
        _class.add_implicit_resolver(_tag, _pattern, list("-+.0123456789"))


def _check(node: Any) -> None:
    if isinstance(node, yaml.ScalarNode):
        if any("\ud800" <= character <= "\udfff" for character in node.value):
            raise ValueError(f"a lone surrogate is no character{node.start_mark}")
    elif isinstance(node, yaml.MappingNode):
        seen = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
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
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{name}: expected a readable text file in UTF-8, got {error}") from None
    return read_yaml(text, name)


def write_yaml(data: Any, path: str | Path) -> None:
    """Write plain data so that a reader sees the old file or the whole new one."""
    text = yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True)
    part = Path(f"{path}.tmp")
    part.write_text(text, encoding="utf-8")
    part.replace(path)
