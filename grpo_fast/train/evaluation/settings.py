"""Settings of `grpo-fast eval`. The defaults come from a recipe or from the evaluated run."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, NamedTuple

from grpo_fast.data import FILES
from grpo_fast.train.config import (
    DataConfig,
    EvalConfig,
    ModelConfig,
    RunConfig,
    Section,
    UserPath,
    require,
)
from grpo_fast.train.config.recipes import load_recipe
from grpo_fast.train.config.words import apply_word, own_words, split_word, validated

DEFAULT_REWARDS = {"gsm8k": ["gsm8k_correct", "gsm8k_format"], "sort": ["sort_positions"]}
SHORT: dict[str, type[Section]] = {"eval": EvalConfig, "data": DataConfig, "model": ModelConfig}
SAMPLED_AT = 0.7  # default temperature of the sampled pass


class EvalSettings(Section):
    """Settings of `grpo-fast eval` that are not settings of a run.

    The command also accepts all settings of a run. The keys of the sections in SHORT can be written
    without the section, for example n=100 for eval.n or task=sort for data.task.
    """

    recipe: str | None = None
    """Name of a recipe or path of a YAML file; null uses the settings of the evaluated run."""
    out: UserPath | None = None
    """JSON file to write the metrics to; null writes no file."""


class Source(NamedTuple):
    """A model to evaluate. `run` is the configuration of its run, or None for a plain model."""

    name: str
    path: str
    run: RunConfig | None

    @classmethod
    def of(cls, model: str) -> Source:
        """Find a model, given as a folder, a hub id, or the folder of a run.

        Raises:
            ValueError: the folder does not exist, is a checkpoint, or belongs to a run that has
                saved no model.
        """
        folder = os.path.expanduser(model)
        is_path = model.startswith((".", "/", "~")) or model.count("/") > 1
        fits = not is_path or os.path.isdir(folder)
        require(fits, "model", "a model or a run", f"{model!r}: no such folder")
        export = f"`grpo-fast export {model} OUT` writes the model of a checkpoint"
        has_config = os.path.isfile(os.path.join(folder, "config.json"))
        is_checkpoint = os.path.isfile(os.path.join(folder, "manifest.json")) and not has_config
        require(not is_checkpoint, "model", "a model or a run", f"a checkpoint; {export}")
        file = os.path.join(folder, "config.yaml")
        if os.path.isfile(file) and os.path.isdir(os.path.join(folder, "model")):
            return cls(model, os.path.join(folder, "model"), load_recipe(file, []))
        fits = not os.path.isfile(file) or has_config
        expected = "a run that has ended and saved its model (log.save_model: true)"
        require(fits, "model", expected, f"no model/ in {model!r}; {export}")
        return cls(model, folder, None)


def is_model(word: str) -> bool:
    """Return True if a command-line argument names a model, False if it is a setting."""
    return os.path.isdir(os.path.expanduser(word)) or ("=" not in word and "/" in word)


def read_settings(
    sources: Sequence[Source], words: Sequence[str], allow_code: bool
) -> tuple[EvalSettings, RunConfig]:
    """Return the settings of an evaluation and the configuration that selects its questions.

    Args:
        sources: the models. If no recipe is named, the settings of the first model that is the
            folder of a run are used.
        words: settings as key=value.
        allow_code: allow reward functions from outside the package.

    Raises:
        ValueError: a setting is invalid, or no setting says where the questions come from.
    """
    # 1. Start with the settings of the recipe. Without a recipe, use the settings of the first run.
    own, words = own_words(EvalSettings, words)
    runs = [(f"{source.name}/config.yaml", source.run) for source in sources if source.run]
    if own.recipe is not None:
        runs = [(own.recipe, load_recipe(own.recipe))]
    settings: dict[str, Any] = {"data": {"task": "gsm8k"}, "eval": {"batch_size": 64}}
    for where, run in runs[:1]:
        settings = run.model_dump(mode="json")
        for reward in run.rewards:
            fits = allow_code or ":" not in reward.name
            came = f"{reward.name!r}, which runs code; if you trust the folder, add --allow-code"
            require(fits, "rewards", f"built-in rewards in {where}", came)
    settings["model"] = {"path": sources[0].path}
    # 2. Apply the key=value arguments.
    words = [_with_section(word) for word in words]
    keys = [split_word(word)[0] for word in words]
    chosen = [key for key in keys if key in ("model", "model.path", "model.trust_remote_code")]
    expected = "the model as the first argument, and --allow-code for its code"
    require(not chosen, "model", expected, ", ".join(chosen))
    if "eval.samples" in keys and "eval.k" not in keys:
        settings["eval"]["k"] = []
    for word in words:
        apply_word(settings, word)
    # 3. Validate the settings, and choose the rewards. A missing source of questions is refused
    # last, because its key may be misspelled, and the validation names the nearest key.
    data = settings["data"]
    expected = "a file, a folder, a hub id or a section of keys"
    require(isinstance(data, dict), "data", expected, repr(data))
    task = str(data.get("task"))
    missing = [x.name for x in sources if not os.path.isdir(x.path)]
    came = f"nothing, and no folder {missing[0]!r} exists here" if missing else "nothing"
    fits = task not in FILES or bool(data.get("path"))
    if not fits:
        data["path"] = "."
    if not runs:
        settings.setdefault("rewards", DEFAULT_REWARDS.get(task, ["exact_match"]))
    kinds: list[type[Section]] = [EvalSettings, *SHORT.values()]
    also = [key for kind in kinds for key in kind.model_fields]
    config = validated(RunConfig, settings, also)
    require(fits, "data", f"data=<file, folder or hub id> with task={task}", came)
    return own, config


def _with_section(word: str) -> str:
    """Add the section to the key of a `key=value` argument, unless the key contains it."""
    name = split_word(word)[0].partition(".")[0]
    above = next((x for x, kind in SHORT.items() if name in kind.model_fields), None)
    return word if above is None else f"{above}.{word}"
