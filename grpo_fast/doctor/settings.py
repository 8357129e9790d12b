"""The words of `grpo-fast doctor`: a model, an engine, its own settings, a run's configuration."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from typing import Any, get_args

from pydantic import Field

from grpo_fast.errors import conflict
from grpo_fast.rollout import EngineName, Sampling
from grpo_fast.train.config import ModelConfig, RunConfig, Section, UserPath, require
from grpo_fast.train.config.recipes import read_recipe
from grpo_fast.train.config.words import nearest, own_words, read_words
from grpo_fast.train.evaluation.settings import Source

BUILT_IN: dict[str, Any] = {  # where no recipe says what is asked: temperature shows if it is lost
    "data": {"task": "open"},
    "rewards": [{"name": "exact_match"}],
    "rollout": {"temperature": 0.8},
}
PATIENCE = 10  # seconds that a server which does not answer is waited for
OF_A_RUN = ("dtype", "autocast", "attn")  # of a run's `model`: how it is loaded, but not its code


class DoctorSettings(Section):
    """The doctor's own settings; every other `key=value` is the run configuration's."""

    recipe: str | None = None  # a recipe's name or a YAML file: its data, sampling and model
    n: int = Field(8, ge=1, le=1 << 10)  # prompts
    samples: int = Field(2, ge=1, le=1 << 10)  # completions of each
    tokens: int = Field(32, ge=1, le=1 << 16)  # of a completion at most
    previous: UserPath | None = None  # weights that the engine may still have
    threshold: float | None = Field(None, ge=0)  # nats per token; None: the dtype's noise
    self_tests: bool = True


class Words:
    """The words by kind: `model` or None, `own` settings, the `config` of a run or None.

    Raises ValueError for a word of no kind, or a configuration that does not fit.
    """

    def __init__(self, words: Sequence[str]) -> None:
        kinds: dict[str, list[str]] = {"url": [], "engine": [], "setting": [], "model": []}
        for word in words:
            kinds[kind_of(word)].append(word)
        for kind in ("model", "url", "engine"):
            came = ", ".join(kinds[kind])
            require(len(kinds[kind]) <= 1, kind, "one at most", came)
        self.own, rest_words = own_words(DoctorSettings, kinds["setting"])
        self.model = next(iter(kinds["model"]), None)
        rest = [f"rollout.engine={name}" for name in kinds["engine"]]
        for url in kinds["url"]:
            rest += ["rollout.engine=vllm-server", f"rollout.vllm.urls={json.dumps([url])}",
                     f"rollout.vllm.patience={PATIENCE}"]  # fmt: skip
        self.config = _config(self.model, self.own, rest + rest_words)

    @property
    def sampling(self) -> Sampling:
        rollout = self.config.rollout
        length = min(rollout.max_new_tokens, self.own.tokens)
        return rollout.model_copy(update={"max_new_tokens": length})

    def previous_config(self) -> ModelConfig | None:
        """The model's own configuration, with the path of the earlier weights."""
        if self.own.previous is None:
            return None
        path = Source.of(self.own.previous).path
        return self.config.model.model_copy(update={"path": path, "config": None, "lora": None})


def kind_of(word: str) -> str:
    if word.startswith(("http://", "https://")):
        return "url"
    if word in get_args(EngineName):
        return "engine"
    return "setting" if "=" in word else "model"


def _config(model: str | None, own: DoctorSettings, rest: list[str]) -> RunConfig | None:
    source = None if model is None else Source.of(model)
    if own.recipe is not None:
        fields = read_recipe(own.recipe)
    elif source is not None and source.run is not None:
        fields = source.run.model_dump(mode="json", exclude_unset=True)
    elif source is not None:
        fields = copy.deepcopy(BUILT_IN)  # `read_words` writes into it
    else:
        first = (rest or ["previous="] * (own.previous is not None) or [""])[0]
        near = nearest(first.partition("=")[0], list(DoctorSettings.model_fields))
        if first:
            why = f"it needs a folder, a hub id or recipe=NAME{near}"
            raise conflict("model=none", first, why)
        return None
    if source is not None:
        run = {} if source.run is None else source.run.model.model_dump()
        loading = {name: run[name] for name in OF_A_RUN if name in run}
        fields = {**fields, "model": {"path": source.path, **loading}}
    servers = (fields.get("rollout") or {}).get("vllm") or {}
    if any(w.startswith("rollout.engine=") and w != "rollout.engine=vllm-server" for w in rest):
        servers.pop("urls", None)  # the run's, for which another engine has no use
    return read_words(RunConfig, rest, fields, DoctorSettings.model_fields)
