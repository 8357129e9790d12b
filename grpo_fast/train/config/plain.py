"""Strict YAML 1.2 reader and writer. The reader rejects aliases and repeated keys."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from grpo_fast.data import reason

# PyYAML follows YAML 1.1, which reads 1e-6 as text, 010 as 8, 1:30 as 90 and off as false. These
# patterns replace PyYAML's numbers and truth values with those of YAML 1.2.
PLAIN = {
    "tag:yaml.org,2002:int": re.compile(r"\A[-+]?[0-9]+$"),
    "tag:yaml.org,2002:float": re.compile(
        r"\A(?:[-+]?(\.[0-9]+|[0-9]+\.[0-9]*|[0-9]+(?=[eE]))([eE][-+]?[0-9]+)?"
        r"|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN))$"
    ),
    "tag:yaml.org,2002:bool": re.compile(r"\A(true|True|TRUE|false|False|FALSE)$"),
}


class _StrictLoader(yaml.SafeLoader):
    """YAML loader that raises a ValueError for aliases and for repeated keys."""

    yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in pairs if tag not in PLAIN]
        for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def compose_node(self, parent: Any, index: Any) -> Any:
        # Reject aliases. With nested aliases, 400 bytes of YAML can expand to a billion values.
        if self.check_event(yaml.AliasEvent):
            raise ValueError("aliases (*name) are not supported: repeat the value")
        node: Any = super().compose_node(parent, index)
        if isinstance(node, yaml.MappingNode):
            seen = set()
            for key, _ in node.value:
                if (key.tag, str(key.value)) in seen:
                    raise ValueError(f"the key {key.value!r} appears twice{key.start_mark}")
                seen.add((key.tag, str(key.value)))
        return node


class _Dumper(yaml.SafeDumper):
    """YAML dumper that quotes a string if the loader would otherwise read it as a number."""

    def ignore_aliases(self, data: Any) -> bool:
        return True  # write repeated values in full, because the loader rejects aliases


for _tag, _pattern in PLAIN.items():
    for _class in (_StrictLoader, _Dumper):
        _class.add_implicit_resolver(_tag, _pattern, list("-+.0123456789tTfF"))
_StrictLoader.add_constructor("tag:yaml.org,2002:int", lambda _, node: int(node.value))


def read_yaml(text: str, name: str) -> Any:
    """Parse a YAML text.

    Args:
        text: the YAML text.
        name: name of the text, for example its path. Error messages begin with this name.

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
    """Write data as YAML. Replace the file atomically, so that no reader sees a partial file."""
    text = yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True)
    part = Path(f"{path}.tmp")
    part.write_text(text, encoding="utf-8")
    part.replace(path)
