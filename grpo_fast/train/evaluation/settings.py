"""Settings of `grpo-fast eval`. A recipe or the evaluated run provides the missing settings."""

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
NEW_TOKENS = 256  # default if neither a setting nor a recipe sets a limit
# Settings that the section `eval` of a recipe provides if the user did not set them.
OF_THE_RECIPE = ("n", "samples", "max_new_tokens", "top_p", "top_k", "k", "batch_size")


class EvalSettings(HeldOut):
    """Settings of `grpo-fast eval`.

    The folder of a run, or `recipe`, provides the data, system prompt, rewards, lengths and
    sampling options that are not set.
    """

    recipe: str | None = None
    """Name of a recipe or path of a YAML file."""
    data: UserPath | None = None
    """File, folder or hub id of the questions."""
    task: Literal["sort", "arithmetic", "gsm8k", "jsonl"] | None = None
    """As data.task of a recipe; so are the following five."""
    columns: dict[str, str] | None = None
    prompt_template: str | None = None
    system_prompt: str | None = None
    chat: bool | None = None
    template_kwargs: dict[str, Any] | None = None
    temperature: float = Field(0.7, gt=0)
    """Temperature of the sampled pass."""
    k: Annotated[list[Positive] | None, CommaList] = None
    """Values of k for pass@k and maj@k; null takes 1, 2, 4 and so on up to `samples`."""
    batch_size: Positive = 64
    """Completions that are sampled at a time."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Dtype of the weights."""
    device: str = "auto"
    """Torch device; auto takes a GPU if one exists."""
    seed: int = 0
    """Seed of the questions and of sampling."""
    out: UserPath | None = None
    """JSON file for the metrics; null writes none."""

    @property
    def is_sampled(self) -> bool:
        """True if a sampled pass follows the greedy pass. Only valid after `complete`."""
        return self.samples > 1 or "temperature" in self.model_fields_set


class Source(NamedTuple):
    """A model to evaluate. If the user named the folder of a run, `run` is the configuration."""

    name: str
    path: str
    run: RunConfig | None

    @classmethod
    def of(cls, model: str) -> Source:
        """Return the source for the folder of a model, a hub id, or the folder of a run.

        Raises:
            ValueError: the folder does not exist, or is the folder of a run without a saved model.
        """
        folder = home_path(model)
        is_path = model.startswith((".", "/", "~")) or model.count("/") > 1
        require(not is_path or os.path.isdir(folder), "model", "a model or a run",
                f"{model!r}: no such folder")  # fmt: skip
        file = os.path.join(folder, "config.yaml")
        if os.path.isfile(file) and os.path.isdir(os.path.join(folder, "model")):
            return cls(model, os.path.join(folder, "model"), load_recipe(file, []))
        fits = not os.path.isfile(file) or os.path.isfile(os.path.join(folder, "config.json"))
        expected = "a run that has ended and saved its model (log.save_model: true)"
        require(fits, "model", expected, f"no model/ in {model!r}")
        return cls(model, folder, None)

    def model_config_for(self, settings: EvalSettings, allow_code: bool) -> ModelConfig:
        """Return the section `model` for loading this source.

        Custom code is allowed only if `allow_code` is True and the run, if there is one, trusted
        it.
        """
        trusted = self.run is None or self.run.model.trust_remote_code
        return ModelConfig(
            path=self.path, dtype=settings.dtype, device=settings.device,
            trust_remote_code=allow_code and trusted,
        )  # fmt: skip


def is_model(word: str) -> bool:
    """Return True if a command-line word names a model, False if it is a setting `key=value`."""
    return os.path.isdir(os.path.expanduser(word)) or ("=" not in word and "/" in word)


def parse_settings(words: Sequence[str]) -> EvalSettings:
    second = "a second model is a folder or a hub id owner/name"
    for word in words:
        require("=" in word, "settings", "key=value", f"{word!r} ({second})")
    return read_words(EvalSettings, words)


def recipe_of(settings: EvalSettings, sources: Sequence[Source], allow: bool) -> RunConfig | None:
    """Return the recipe that provides missing settings: `recipe`, or the first run in `sources`.

    Returns:
        The recipe, or None if there is neither a recipe nor a run.

    Raises:
        ValueError: a reward function must be imported, and `allow` is False.
    """
    runs = [(f"{source.name}/config.yaml", source.run) for source in sources if source.run]
    if settings.recipe is not None:
        runs = [(settings.recipe, load_recipe(settings.recipe, []))]
    if not runs:
        return None
    where, run = runs[0]
    for reward in run.rewards:
        fits = allow or ":" not in reward.name
        came = f"{reward.name!r}, which runs code; if you trust the folder, add --allow-code"
        require(fits, "rewards", f"built-in rewards in {where}", came)
    return run


def complete(settings: EvalSettings, recipe: RunConfig | None) -> EvalSettings:
    """Fill settings that the user did not set from the section `eval` of a recipe."""
    given = settings.model_dump(exclude_unset=True)
    changes: dict[str, Any] = {}
    length = NEW_TOKENS
    if recipe is not None:
        length = recipe.rollout.max_new_tokens
        changes = {name: getattr(recipe.eval, name) for name in OF_THE_RECIPE}
        samples = given.get("samples", changes["samples"])
        changes["k"] = [size for size in changes["k"] if size <= samples] or None
        if recipe.eval.temperature:  # at 0 the greedy pass is enough
            changes["temperature"] = recipe.eval.temperature
    complete = settings.model_copy(update={**changes, **given})
    complete.max_new_tokens = complete.max_new_tokens or length
    expected = f"values from 1 to samples={complete.samples}"
    require(max(complete.k or [1]) <= complete.samples, "k", expected, complete.k)
    return complete


def data_of(
    settings: EvalSettings, recipe: RunConfig | None, models: Sequence[str] = ()
) -> DataConfig:
    """Return the section `data` that describes the questions.

    Raises:
        ValueError: neither a setting nor a recipe names the questions.
    """
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
    missing = [name for name in models if not os.path.isdir(os.path.expanduser(name))]
    came = f"nothing, and no folder {missing[0]!r} exists here" if missing else "nothing"
    require(fits, "data", f"data=<jsonl file, folder or hub id> {whose}", came)
    return validated(DataConfig, fields, at="data")
