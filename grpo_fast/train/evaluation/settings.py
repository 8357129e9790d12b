"""The settings of `grpo-fast eval`, and the recipe or run that completes them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field

from grpo_fast.data import is_local
from grpo_fast.train.config import (
    DataConfig,
    HeldOut,
    ModelConfig,
    Positive,
    RunConfig,
    UserPath,
    home_path,
    require,
)
from grpo_fast.train.config.base import CommaList
from grpo_fast.train.config.recipes import load_recipe
from grpo_fast.train.config.words import read_words, validated

DEFAULT_REWARDS = {
    "gsm8k": ("gsm8k_correct", "gsm8k_format"),
    "sort": ("sort_positions",),
    "arithmetic": ("exact_match",),
    "jsonl": ("exact_match",),
}
NEW_TOKENS, TEMPERATURE = 256, 0.7  # where neither settings nor a recipe say it
# What a recipe's section `eval` says unless a setting does.
OF_THE_RECIPE = ("n", "samples", "max_new_tokens", "top_p", "top_k", "k", "batch_size")


class EvalSettings(HeldOut):
    """The `key=value` settings of `grpo-fast eval`.

    A run's folder, or `recipe`, brings data, system prompt, rewards, lengths and sampling.
    """

    recipe: str | None = None  # a recipe's name or a YAML file
    data: UserPath | None = None  # jsonl file, folder or hub id
    task: Literal["sort", "arithmetic", "gsm8k", "jsonl"] | None = None
    columns: dict[str, str] | None = None
    prompt_template: str | None = None
    system_prompt: str | None = None
    chat: bool | None = None
    template_kwargs: dict[str, Any] | None = None
    temperature: float = Field(TEMPERATURE, gt=0)  # of the sampled pass
    # for pass@k and maj@k; None: 1, 2, 4, … up to samples
    k: Annotated[list[Positive] | None, CommaList] = None
    batch_size: Positive = 64
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    device: str = "auto"
    seed: int = 0
    out: UserPath | None = None  # also write the metrics to this JSON file

    @property
    def is_sampled(self) -> bool:
        """Whether a sampled pass follows the greedy one; of completed settings."""
        return self.samples > 1 or "temperature" in self.model_fields_set


class Source(NamedTuple):
    """A model to evaluate: its own folder or hub id, and the run that made it, if it is a run's."""

    name: str
    path: str
    run: RunConfig | None

    @classmethod
    def of(cls, model: str) -> Source:
        folder = home_path(model)
        file = os.path.join(folder, "config.yaml")
        if os.path.isfile(file) and os.path.isdir(os.path.join(folder, "model")):
            return cls(model, os.path.join(folder, "model"), load_recipe(file, []))
        fits = not os.path.isfile(file) or os.path.isfile(os.path.join(folder, "config.json"))
        expected = "a run that has ended and saved its model (log.save_model: true)"
        require(fits, "model", expected, f"no model/ in {model!r}")
        return cls(model, folder, None)

    def model_config_for(self, settings: EvalSettings, allow_code: bool) -> ModelConfig:
        """How to load it; of a run its own classes only if its configuration says so."""
        trusted = self.run is None or self.run.model.trust_remote_code
        return ModelConfig(
            path=self.path, dtype=settings.dtype, device=settings.device,
            trust_remote_code=allow_code and trusted,
        )  # fmt: skip


def is_model(word: str) -> bool:
    return os.path.isdir(os.path.expanduser(word)) or ("=" not in word and "/" in word)


def parse_settings(words: Sequence[str]) -> EvalSettings:
    second = "a second model is a folder or a hub id owner/name"
    for word in words:
        require("=" in word, "settings", "key=value", f"{word!r} ({second})")
    return read_words(EvalSettings, words)


def recipe_of(settings: EvalSettings, sources: Sequence[Source], allow: bool) -> RunConfig | None:
    """The recipe that completes the settings: the named one, else the first run among the models.

    Raises ValueError where rewards name code to import that was not allowed.
    """
    runs = [(f"{source.name}/config.yaml", source.run) for source in sources if source.run]
    if settings.recipe is not None:
        runs = [(settings.recipe, load_recipe(settings.recipe, []))]
    for where, run in runs[:1]:
        for reward in run.rewards:
            came = f"{reward.name!r}, whose code would be run; --allow-code allows that"
            came += " to a folder that you trust"
            fits = allow or ":" not in reward.name
            require(fits, "rewards", f"built-in ones in {where}", came)
        return run
    return None


def complete(settings: EvalSettings, recipe: RunConfig | None) -> EvalSettings:
    """Fill the settings that nobody set with those of the recipe's evaluation."""
    own, changes, length = settings.model_dump(exclude_unset=True), {}, NEW_TOKENS
    if recipe is not None:
        changes = {name: getattr(recipe.eval, name) for name in OF_THE_RECIPE}
        samples, length = own.get("samples", changes["samples"]), recipe.rollout.max_new_tokens
        changes["k"] = [size for size in changes["k"] if size <= samples] or None
        if recipe.eval.temperature:  # 0 is the greedy pass
            changes["temperature"] = recipe.eval.temperature
    whole = settings.model_copy(update={**changes, **own})
    whole.max_new_tokens = whole.max_new_tokens or length
    expected = f"values from 1 to samples={whole.samples}"
    require(max(whole.k or [1]) <= whole.samples, "k", expected, whole.k)
    return whole


def data_of(settings: EvalSettings, recipe: RunConfig | None) -> DataConfig:
    """Where the questions come from. Raises ValueError where nothing says it."""
    fields: dict[str, Any] = recipe.data.model_dump() if recipe else {"task": "gsm8k"}
    if settings.data is not None:
        kind = "path" if is_local(settings.data) else "name"
        fields |= {"path": None, "name": None, kind: settings.data}
    for name in ("task", "columns", "prompt_template", "system_prompt", "chat", "template_kwargs"):
        value = getattr(settings, name)
        if value is not None:
            fields[name] = value
    whose = f"with task={fields['task']}" if recipe else "for a model without a recipe"
    fits = fields["task"] not in ("gsm8k", "jsonl") or fields.get("path") or fields.get("name")
    require(fits, "data", f"data=<jsonl file, folder or hub id> {whose}", "nothing")
    return validated(DataConfig, fields, at="data")
