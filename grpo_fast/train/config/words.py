"""Settings as words `key=value`, and error messages that name the nearest key or value."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from grpo_fast.data import is_local
from grpo_fast.errors import nearest_name
from grpo_fast.train.config.base import members, require
from grpo_fast.train.config.plain import read_yaml, read_yaml_file
from grpo_fast.train.config.run import reward_sections

QUOTED = 200  # characters of a value that a message shows
DEEPEST_KEY = 16  # parts of a dotted key

OTHER_NAMES = Path(__file__).with_name("other_names.yaml")

Config = TypeVar("Config", bound=BaseModel)


# ----------------------------------------------------------------------------------------- words
def read_words(
    kind: type[Config],
    words: Iterable[str],
    settings: dict[str, Any] | None = None,
    also: Iterable[str] = (),
) -> Config:
    """Return a configuration from settings that words change.

    Args:
        kind: the class of the configuration.
        words: changes such as ``optim.lr=1e-4`` or ``rewards.0.weight=2``. Values are read as YAML.
            Of two words with the same key the last one counts.
        settings: nested settings, changed in place; None starts without any.
        also: further keys of the command, which messages list together with the keys of `kind`.

    Raises:
        ValueError: a word has another form, a key is unknown, or a value does not fit.
    """
    # All words are applied before validation, because single changes may conflict.
    settings = {} if settings is None else settings
    for word in words:
        apply_word(settings, word)
    return validated(kind, settings, also=also)


def own_words(kind: type[Config], words: Sequence[str]) -> tuple[Config, list[str]]:
    """Return the settings that words give to the fields of `kind`, and all other words."""
    # A dotted key such as model.path is never a setting of the command itself.
    own = [word for word in words if split_word(word)[0] in kind.model_fields]
    return read_words(kind, own), [word for word in words if word not in own]


def split_word(word: str) -> tuple[str, str]:
    """Return key and text of a word `key=text`.

    Raises:
        ValueError: the word has another form. The message quotes the word.
    """
    key, equals, text = word.partition("=")
    parts = key.split(".")
    fits = equals and all(parts) and len(parts) <= DEEPEST_KEY and key.isprintable()
    require(fits, "settings", "key=value", quoted(word))
    return key, text


def apply_word(settings: dict[str, Any], word: str) -> None:
    """Change nested settings as a word says.

    Three short forms exist. `rewards=NAME` is a list of one section. `data=X` sets data.path for a
    file or folder, otherwise data.name. `model=X` sets model.path in place of a recipe's config.
    """
    key, text = split_word(word)
    value = read_yaml(text, quoted(key, str))
    section = settings.get(key)
    is_short = isinstance(value, str) and isinstance(section, dict)
    if key == "rewards":
        value = reward_sections(value)
    if key == "model" and is_short:
        section.update(path=value, config=None, tokenizer=None)
    elif key == "data" and is_short:
        path, name = (value, None) if is_local(value) else (None, value)
        section.update(path=path, name=name)
    else:
        set_key(settings, key, value)


def set_key(settings: dict[str, Any], key: str, value: Any) -> None:
    """Set a value at a dotted key of nested settings. Sections that are missing are created."""
    node: Any = settings
    *above, last = key.split(".")
    for part in above:
        index = _index(node, part, key)
        # null stands for an optional section, such as model.lora.
        if isinstance(node, dict) and node.get(index) is None:
            node[index] = {}
        node = node[index]
    node[_index(node, last, key)] = value


def _index(node: Any, part: str, key: str) -> Any:
    """Return a part of a dotted key as an index of a dict or a list."""
    if isinstance(node, dict):
        return part
    where = f"{quoted(key, str)}: {quoted(part)}"
    if not isinstance(node, list):
        raise ValueError(f"{where} is below a value, not a section")
    if part not in map(str, range(len(node))):
        raise ValueError(f"{where} is not an index of a list of {len(node)}")
    return int(part)


# ----------------------------------------------------------------------------------------- errors
def validated(
    kind: type[Config], settings: Any, *, at: str = "", also: Iterable[str] = ()
) -> Config:
    """Return settings as a configuration.

    Args:
        kind: the class of the configuration.
        settings: nested settings.
        at: dotted key of the section, if the settings are part of a larger configuration.
        also: as in `read_words`.

    Raises:
        ValueError: settings do not fit. The message has one line for each.
    """
    try:
        return kind.model_validate(settings)
    except ValidationError as error:
        lines = [_explain(each, kind, at, also) for each in error.errors(include_url=False)]
        raise ValueError("\n  ".join(dict.fromkeys(lines))) from None


def _explain(error: Any, kind: type[BaseModel], at: str, also: Iterable[str]) -> str:
    """Return pydantic's error as a line with the dotted key, the expectation and the value."""
    # 1. The dotted key. Parts that are not fields are pydantic's names for members of a union.
    path: list[str] = []
    section = None
    annotation: Any = kind
    for part in error["loc"]:
        section = section_of(annotation)
        if isinstance(part, int):
            path.append(str(part))
        elif section is not None:
            path.append(part)
            field = section.model_fields.get(part)
            annotation = field and field.annotation
    where = quoted(".".join([at, *path] if at else path), str)
    # 2. Errors of a key.
    if error["type"] == "extra_forbidden":
        known = [*section.model_fields, *getattr(section, "more_keys", ())]
        if len(path) == 1:
            known += also
        return f"{where}: unknown key" + nearest(path[-1], known, list(dotted_keys(kind)))
    if error["type"] == "missing":
        return f"{where}: is missing"
    # 3. Errors of a value. A section's own check names the field, and quotes the value.
    message = error["msg"].removeprefix("Value error, ")
    value = error["input"]
    if error["type"] == "value_error" and section_of(annotation) is not None:
        return f"{where}.{message}" if where else message
    if error["type"] == "model_type":
        message = "expected a section of keys"
    if isinstance(value, (dict, BaseModel)):
        return f"{where}: {message}"
    choices = _choices(annotation) if error["type"] in ("literal_error", "bool_parsing") else []
    if choices:
        message = f"expected one of {', '.join(choices)}"
    shown = str(value).lower() if isinstance(value, bool) else quoted(value)
    close = nearest_name(str(value), choices)
    hint = f"; nearest: {close}" if close else ""
    return f"{where}: {message}, got {shown}{hint}"


def fields_of(kind: type[BaseModel], above: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Yield the dotted key and the field of every setting. A list of sections has the index 0."""
    for name, field in kind.model_fields.items():
        yield above + name, field
        section = section_of(field.annotation)
        if section is not None:
            first = "0." if get_origin(field.annotation) is list else ""
            yield from fields_of(section, f"{above}{name}.{first}")


def dotted_keys(kind: type[BaseModel]) -> Iterator[str]:
    return (key for key, _ in fields_of(kind))


def section_of(annotation: Any) -> Any:
    """Return the section in a type such as `Section | None` or `list[Section]`, or None."""
    types = (x for x in members(annotation) if isinstance(x, type) and not get_args(x))
    return next((x for x in types if issubclass(x, BaseModel)), None)


def _choices(annotation: Any) -> list[str]:
    """Return the words that a field accepts, if there are few."""
    types = list(members(annotation))
    words = [word for word in types if isinstance(word, str)]
    if bool in types:
        words += ["true", "false"]
    if type(None) in types or None in types:
        words.append("null")
    return words


def other_names() -> dict[str, str]:
    """Return our key for every name of a setting in TRL, verl, OpenRLHF and transformers."""
    table = read_yaml_file(OTHER_NAMES, "other_names")
    return {theirs: ours for ours, names in table.items() for theirs in names.split()}


def nearest(key: str, known: Sequence[str], dotted: Sequence[str] = ()) -> str:
    """Return the end of a message about an unknown key.

    It names the same setting under another library's name, otherwise similar keys, otherwise all.

    Args:
        key: the unknown key, without the section in front.
        known: the keys of its section.
        dotted: all keys of the configuration.
    """
    ours = other_names().get(key.casefold(), "")
    if ours.partition("=")[0] in dotted:
        return f"; here it is {ours}"
    for name in (ours.rpartition(".")[2], key):
        same = [name] if name in known else [d for d in dotted if d.rpartition(".")[2] == name]
        if same:
            return f"; nearest: {', '.join(same)}"
    close = nearest_name(key, known, cutoff=0.7) or nearest_name(key, dotted, cutoff=0.85)
    return f"; nearest: {close}" if close else f"; known: {', '.join(known)}"


def quoted(value: Any, show: Any = repr) -> str:
    """Return a value as a message shows it, at most 200 characters of it."""
    text = show(value)
    return text if len(text) <= QUOTED else f"{text[:QUOTED]}… ({len(text)} characters)"
