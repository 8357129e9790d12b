"""The words of a picture of runs: recipe, seed, model, and the settings that differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo_fast.data import escape_control
from grpo_fast.train.config.plain import read_yaml_file

MOST_SETTINGS = 3  # of those that differ
LONGEST = 30  # characters of a value
OWN = ("output_dir", "log", "resume")  # they differ from run to run and explain nothing


def settings_of(run: str | Path) -> dict[str, Any]:
    """Dotted key → value of the run's config.yaml; empty without a readable one."""
    folder = Path(run) if Path(run).is_dir() else Path(run).parent
    try:
        settings = read_yaml_file(folder / "config.yaml", "config.yaml")
    except (OSError, ValueError):
        return {}
    return flat(settings) if isinstance(settings, dict) else {}


def flat(settings: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    flattened: dict[str, Any] = {}
    for key, value in settings.items():
        name = f"{above}{key}"
        flattened |= flat(value, f"{name}.") if isinstance(value, Mapping) else {name: value}
    return flattened


def title_of(name: str, settings: dict[str, Any]) -> str:
    """`sort · seed 0 · llama · grpo, centered`; the name is harmless already."""
    if not settings:
        return name
    model = settings.get("model.path") or settings.get("model.config.model_type")
    chosen = [settings.get("loss.loss_type"), settings.get("advantages")]
    parts = [f"seed {settings.get('seed')}", model, ", ".join(map(str, filter(None, chosen)))]
    return " · ".join([name, *(plain(part) for part in parts if part)])


def differing(runs: Sequence[dict[str, Any]]) -> list[str]:
    """For each run the settings that not all have alike, the first few: `optim.lr=0.1, seed=2`."""
    keys = [key for key in dict.fromkeys(k for run in runs for k in run) if not key.startswith(OWN)]
    telling = [key for key in keys if any(run.get(key) != runs[0].get(key) for run in runs)]
    shown = telling[:MOST_SETTINGS]
    more = ", …" * (len(telling) > MOST_SETTINGS)
    return [", ".join(f"{key}={plain(run.get(key))}" for key in shown) + more for run in runs]


def has_entropy_bonus(settings: dict[str, Any]) -> bool:
    """Whether the logged loss contains −coefficient · entropy, so that it may fall below 0."""
    return bool(settings.get("loss.entropy_coef"))


def plain(value: Any) -> str:
    """A value as a picture shows it: short, harmless, no mathematics."""
    text = escape_control(str(value))
    text = text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"
    return text.replace("$", r"\$")
