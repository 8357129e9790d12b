"""Settings as text: strict YAML, `key=value` words, and messages that name the nearest key."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from inspect import cleandoc
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError

from grpo_fast.data.readers import GYM
from grpo_fast.errors import nearest_hint, nearest_name, reason, require

QUOTED = 200  # maximum number of characters of a value in an error message
YAML_WORDS = {"None": "null", "True": "true", "False": "false"}

Config = TypeVar("Config", bound=BaseModel)


# -------------------------------------------------------------------------------------------- YAML
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


for _tag, _pattern in PLAIN.items():
    for _class in (_StrictLoader, _Dumper):
        _class.add_implicit_resolver(_tag, _pattern, list("-+.0123456789tTfF"))
_StrictLoader.add_constructor("tag:yaml.org,2002:int", lambda _, node: int(node.value))


def read_yaml(source: str | Path, name: str) -> Any:
    """Parse a YAML text.

    Args:
        source: the YAML text, or the path of a file that contains it in UTF-8.
        name: name of the text. Error messages begin with this name.

    Raises:
        ValueError: the file cannot be read, or the text is not strict YAML.
    """
    came = repr(str(source)[:60])
    try:
        text = source.read_text(encoding="utf-8") if isinstance(source, Path) else source
        return _StrictLoader(text).get_single_data()
    # PyYAML's constructors raise many exception classes. For example, a malformed date raises a
    # ValueError from datetime.
    except Exception as error:
        raise ValueError(f"{name}: expected plain YAML, got {came}: {reason(error)}") from None


def save_config(config: BaseModel, path: str | Path) -> None:
    """Write a configuration, including defaults, to a YAML file that `load_recipe` can read.

    The file is replaced atomically, so that no reader sees a partial file.
    """
    # `model_dump` returns new containers. If one occurred twice, PyYAML would write an alias, which
    # the loader rejects.
    settings = config.model_dump(mode="json")
    text = yaml.dump(settings, Dumper=_Dumper, sort_keys=False, allow_unicode=True)
    part = Path(f"{path}.tmp")
    part.write_text(text, encoding="utf-8")
    part.replace(path)


# --------------------------------------------------------------------- Parsing of key=value words
def read_words(kind: type[Config], words: Iterable[str], settings: dict[str, Any]) -> Config:
    """Build a configuration from nested settings and `key=value` words that change them.

    Args:
        kind: class of the configuration.
        words: changes such as ``optim.lr=1e-4`` or ``rewards.0.weight=2``. Values are read as YAML.
            If a key appears twice, the last word is used.
        settings: nested settings, which are changed in place.

    Raises:
        ValueError: a word is not of the form key=value, a key is unknown, or a value is invalid.
    """
    # Apply all changes before the validation, because some changes are only valid together.
    apply_words(settings, words)
    return validated(kind, settings)


def recipe_in(words: Iterable[str]) -> str | None:
    """Return the value of the last word `recipe=NAME`, or None if it is null or there is none."""
    text = dict(map(split_word, words)).get("recipe")
    return None if text is None or read_yaml(text, "recipe") is None else text


def reward_sections(rewards: Any) -> Any:
    """Convert the setting `rewards` to a list of reward sections.

    A single reward becomes a list with one element. A string such as myreward.py:reward becomes a
    section with this name.
    """
    listed = [rewards] if isinstance(rewards, (str, dict)) else rewards
    if not isinstance(listed, list):
        return listed
    return [{"name": reward} if isinstance(reward, str) else reward for reward in listed]


def split_word(word: str) -> tuple[str, str]:
    """Split a command-line argument `key=text` into key and text.

    Raises:
        ValueError: the argument does not have this form. The message quotes the argument.
    """
    key, equals, text = word.partition("=")
    parts = key.split(".")
    fits = equals and all(parts) and len(parts) <= 16 and key.isprintable()
    require(fits, "settings", "key=value", quoted(word))
    return key, text


def apply_words(settings: dict[str, Any], words: Iterable[str]) -> None:
    """Apply `key=value` arguments to nested settings. Convert the rewards to sections.

    Three keys have short forms. The short forms of `data` and `model` work only if the settings
    already contain these sections.

    - `rewards=NAME` sets a list with one reward section.
    - `data=X` sets data.path. `data=reasoning_gym:NAME` also sets the reward `reasoning_gym`.
    - `model=X` sets model.path and removes the recipe's config and tokenizer.
    """
    if "rewards" in settings:
        settings["rewards"] = reward_sections(settings["rewards"])
    # Apply `data=reasoning_gym:NAME` first. It sets a reward, which the other words may replace.
    for word in sorted(words, key=lambda word: not word.startswith(f"data={GYM}")):
        key, text = split_word(word)
        value = read_yaml(text, quoted(key, str))
        is_short = isinstance(value, str) and isinstance(settings.get(key), dict)
        if key == "model" and is_short:
            settings[key].update(path=value, config=None, tokenizer=None)
        elif key == "data" and is_short:
            settings[key]["path"] = value
            if value.startswith(GYM):
                settings[key]["task"] = "jsonl"
                settings["rewards"] = [{"name": "reasoning_gym"}]
        else:
            set_key(settings, key, value)
        if key.partition(".")[0] == "rewards":
            settings["rewards"] = reward_sections(settings["rewards"])


def set_key(settings: dict[str, Any], key: str, value: Any) -> None:
    """Set the value of a dotted key in nested settings, and create missing sections.

    Raises:
        ValueError: a part of the key is below a value that has no keys, or is not a valid index of
            a list.
    """
    node: Any = settings
    for part in key.split("."):
        where = f"{quoted(key, str)}: {quoted(part)}"
        if not isinstance(node, (dict, list)):
            raise ValueError(f"{where} is below a value, not a section")
        if isinstance(node, list) and part not in map(str, range(len(node))):
            raise ValueError(f"{where} is not an index of a list of {len(node)}")
        parent = node
        index: Any = int(part) if isinstance(node, list) else part
        # Replace null with an empty section, so that keys of optional sections such as model.lora
        # can be set.
        if isinstance(node, dict) and node.get(part) is None:
            node[part] = {}
        node = node[index]
    parent[index] = value


# --------------------------------------------------------------------------------- Error messages
def validated(kind: type[Config], settings: Any) -> Config:
    """Validate nested settings and return them as a configuration.

    Raises:
        ValueError: a setting is invalid. The message has one line for each invalid setting.
    """
    try:
        return kind.model_validate(settings)
    except ValidationError as error:
        lines = [_explain(each, kind) for each in error.errors(include_url=False)]
        raise ValueError("\n  ".join(dict.fromkeys(lines))) from None


def _explain(error: Any, kind: type[BaseModel]) -> str:
    """Format a pydantic error as one line with the dotted key, expected value and actual value."""
    where = quoted(".".join(map(str, error["loc"])), str)
    listed = ".".join("0" if isinstance(part, int) else part for part in error["loc"])
    keys = list(dotted_keys(kind))
    # 1. Describe an unknown key.
    if error["type"] == "extra_forbidden":
        above = listed.rpartition(".")[0]
        known = [key.rpartition(".")[2] for key in keys if key.rpartition(".")[0] == above]
        return f"{where}: unknown key" + nearest(where, known, keys)
    # 2. Describe an invalid value. The message of a section's validator already begins with the
    # name of the field, so add only the name of the section.
    message = error["msg"].removeprefix("Value error, ")
    value = error["input"]
    is_section = not listed or any(key.startswith(f"{listed}.") for key in keys)
    if error["type"] == "value_error" and is_section:
        return f"{where}.{message}".removeprefix(".")
    if isinstance(value, (dict, BaseModel)):
        return f"{where}: {message}"
    choices = []
    if error["type"] == "literal_error":
        message = re.sub(r"\b(None|True|False)\b", lambda word: YAML_WORDS[word[0]], message)
        choices = re.findall(r"null|true|false|(?<=')[\w-]+(?=')", message)
    shown = quoted(value, json.dumps if value is None or isinstance(value, bool) else repr)
    return f"{where}: {message}, got {shown}{nearest_hint(str(value), choices)}"


def fields_of(kind: type[BaseModel], above: str = "") -> Iterator[tuple[str, type[BaseModel], str]]:
    """Yield the dotted key of every setting, the section that has it, and its name there.

    If a field is a list of sections, its keys have the index 0, for example `rewards.0.name`.
    """
    for name, field in kind.model_fields.items():
        yield above + name, kind, name
        section = section_of(field.annotation)
        if section is not None:
            first = "0." if get_origin(field.annotation) is list else ""
            yield from fields_of(section, f"{above}{name}.{first}")


def dotted_keys(kind: type[BaseModel]) -> Iterator[str]:
    return (key for key, _, _ in fields_of(kind))


def described(kind: type) -> dict[str, str]:
    """Return the descriptions of a class's fields, which its docstring lists as `name: text`.

    A description in a subclass replaces the description in its base class.
    """
    # Python 3.13 removes the indentation of docstrings, and earlier versions keep it.
    documents = "\n".join(cleandoc(base.__doc__ or "") for base in reversed(kind.__mro__))
    found = re.findall(r"^ +(\w+): (.*(?:\n {8}.*)*)", documents, re.M)
    # LossConfig names the type of an option before its description.
    texts = {name: re.sub(r"^(str|bool|int|float)( or [a-z ]+)?\. ", "", x) for name, x in found}
    return {name: " ".join(text.split()) for name, text in texts.items()}


def section_of(annotation: Any) -> Any:
    """Return the section class in a type such as `Section | None` or `list[Section]`, or None."""
    parts = (annotation, *get_args(annotation))
    classes = [part for part in parts if isinstance(part, type) and not get_args(part)]
    return next((part for part in classes if issubclass(part, BaseModel)), None)


@functools.cache
def other_names() -> dict[str, str]:
    """Map setting names of TRL, verl, OpenRLHF and transformers to the keys of this package."""
    table = read_yaml(Path(__file__).with_name("other_names.yaml"), "other_names")
    return {theirs: ours for ours, names in table.items() for theirs in names.split()}


def nearest(key: str, known: Sequence[str], dotted: Sequence[str] = ()) -> str:
    """Return a suggestion that is appended to the error message for an unknown key.

    If the key is a setting of another library, suggest the matching key of this package. Otherwise
    suggest similar keys. If no key is similar, list all known keys.

    Args:
        key: the unknown key with its section.
        known: all keys of the section.
        dotted: all dotted keys of the configuration.
    """
    names = other_names()
    last = key.rpartition(".")[2]
    ours = names.get(key.casefold()) or names.get(last.casefold(), "")
    if ours.partition("=")[0] in dotted:
        return f"; here it is {ours}"
    same = [name for name in dotted if name.rpartition(".")[2] == last]
    close = nearest_name(last, known, cutoff=0.7) or nearest_name(last, dotted, cutoff=0.85)
    found = ", ".join(same) or close
    return f"; nearest: {found}" if found else f"; known: {', '.join(known)}"


def quoted(value: Any, show: Any = repr) -> str:
    """Format a value for an error message. Text longer than QUOTED characters is truncated."""
    text = show(value)
    return text if len(text) <= QUOTED else f"{text[:QUOTED]}… ({len(text)} characters)"


# ------------------------------------------------------------------------------ Listing of all keys
def listed_keys(kind: type[BaseModel], prefix: str = "") -> list[str]:
    """Return two lines per configuration key: `key: type = default`, and the description.

    Args:
        kind: class of the configuration.
        prefix: a section such as `optim`, or a single key. The empty string selects all keys.

    Raises:
        ValueError: no key or section has the name `prefix`.
    """
    lines = []
    root = kind.model_json_schema()
    schemas = {kind.__name__: root, **root["$defs"]}
    for key, section, name in fields_of(kind):
        if not prefix or key == prefix or key.startswith(f"{prefix}."):
            schema = schemas[section.__name__]["properties"][name]
            default = f" = {json.dumps(schema['default'])}" if "default" in schema else ""
            lines += [f"{key}: {_type_words(schema)}{default}", f"    {described(section)[name]}"]
    if not lines:
        hint = nearest(prefix, list(kind.model_fields), list(dotted_keys(kind)))
        raise ValueError(f"config: no key or section {prefix!r}{hint}")
    return lines


def _type_words(schema: Mapping[str, Any]) -> str:
    """Describe the values that a JSON schema allows, for example `integer | null`."""
    if "anyOf" in schema:
        return " | ".join(map(_type_words, schema["anyOf"]))
    if "enum" in schema:
        return " | ".join(json.dumps(value).strip('"') for value in schema["enum"])
    if schema.get("type") == "array":
        return f"list of {_type_words(schema['items'])}"
    return str(schema.get("const", schema.get("type", "section")))
