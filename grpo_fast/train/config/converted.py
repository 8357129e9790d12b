"""Conversion of configurations of TRL, verl and OpenRLHF to `key=value` arguments."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from typing import Any

from grpo_fast.errors import require
from grpo_fast.train.config import RunConfig
from grpo_fast.train.config.recipes import load_recipe
from grpo_fast.train.config.words import dotted_keys, other_names, read_yaml_file

# A text that YAML reads as a text without quotes.
PLAIN_TEXT = re.compile(r"(?!(true|false|null)$)[a-z~./][a-z0-9_./-]+", re.I)


def converted(path: str) -> list[str]:
    """Return the settings of a configuration of TRL, verl or OpenRLHF as words of this package.

    Args:
        path: a YAML or JSON file, such as `GRPOConfig.to_json_string()` or verl's ppo_trainer.yaml.

    Returns:
        One quoted word `key=value` per line, and then comments with the settings that have no
        counterpart, or whose counterpart counts something else.

    Raises:
        ValueError: the file is not a mapping in YAML or JSON.
    """
    theirs = read_yaml_file(path, path)
    require(isinstance(theirs, dict), path, "a mapping of keys", type(theirs).__name__)
    settings = dict(_flat(theirs))
    words: dict[str, str] = {}
    others: dict[str, list[str]] = {}
    names = other_names()
    own = list(dotted_keys(RunConfig))
    for name, value in settings.items():
        above, _, last = name.rpartition(".")
        # 1. Find our key. A deep key must be in the table with its full name, because another
        # section, such as verl's critic, may have a key of the same last name.
        short = last if name.count(".") < 2 else name
        text = str(value).lower() if isinstance(value, bool) else str(value)
        by_value = names.get(f"{name}={text}") or names.get(f"{short}={text}")
        same = [key for key in own if key.rpartition(".")[2] == short]
        ours = by_value or names.get(name) or names.get(short, "")
        if not ours and len(same) == 1:
            ours = same[0]
        if not ours and names.get(last, "").endswith("?"):
            ours = names[last]
        # 2. Leave out what is off, and what the other library computes.
        is_off = value in (None, False, "", "no", "none", "???", [], {}) and not by_value
        if is_off or "${" in text or last.startswith("_"):
            continue
        # 3. Keep the word if the configuration accepts its value.
        is_plain = isinstance(value, str) and PLAIN_TEXT.fullmatch(text)
        shown = text if is_plain else json.dumps(value)
        word = ours if "=" in ours else f"{ours}={shown}"
        why = f"see {ours[:-1]}" if ours.endswith("?") else _refusal(word) if ours else ""
        if last.startswith("kl_loss") and settings.get(f"{above}.use_kl_loss") is False:
            why = "use_kl_loss is off"
        if ours and not why:
            words[word.partition("=")[0]] = word
        else:
            others.setdefault(above, []).append(f"{last}={text}" + f" ({why})" * bool(why))
    if float(words.get("loss.beta", "=0").partition("=")[2]):
        words.setdefault("reference.kind", "reference.kind=frozen")
    if words.get("advantages") != "advantages=gae":  # only gae reads a critic
        words = {key: word for key, word in words.items() if not key.startswith("critic.")}
    lines = [f"# not expressed: {name or 'keys'}: {', '.join(x)}" for name, x in others.items()]
    return [*map(shlex.quote, words.values()), *lines]


def _flat(settings: dict[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted name and the value of each setting in nested settings."""
    for name, value in settings.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{above}{name}.")
        else:
            yield f"{above}{name}", value


def _refusal(word: str) -> str:
    """Return why a run refuses the value of a single word, or "" if it accepts the value."""
    key = word.partition("=")[0]
    try:
        load_recipe("own-data", [word])
    except ValueError as error:
        text = str(error)  # a conflict with another setting has a different beginning
        return text.removeprefix(f"{key}: ") if text.startswith(f"{key}: ") else ""
    return ""
