"""`grpo-fast plan`: what fits on a GPU, by the memory model, without loading any weights."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from pydantic import Field

from grpo_fast.attention import trunk_tokens
from grpo_fast.data import reason, task_symbols
from grpo_fast.data.hub import check_fields, check_files, read_fields
from grpo_fast.train.config import DataConfig, ModelConfig, RunConfig, Section, require
from grpo_fast.train.config.recipes import load_settings, recipe_names
from grpo_fast.train.config.words import own_words, read_words
from grpo_fast.train.planning.memory_model import USABLE_GPU, Memory, Shape, predict_run

# Sizes of public models, as fields of their transformers configs: nobody has to ask the hub.
_QWEN2: dict[str, Any] = {
    "model_type": "qwen2", "max_position_embeddings": 1 << 20, "rope_theta": 1_000_000.0,
    "vocab_size": 151936, "tie_word_embeddings": True,
}  # fmt: skip
KNOWN_MODELS: dict[str, dict[str, Any]] = {
    "qwen2.5-0.5b": {
        **_QWEN2, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
        "num_attention_heads": 14, "num_key_value_heads": 2,
    },
    "qwen2.5-1.5b": {
        **_QWEN2, "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28,
        "num_attention_heads": 12, "num_key_value_heads": 2,
    },
    "qwen2.5-7b": {
        **_QWEN2, "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
        "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064,
        "tie_word_embeddings": False,
    },
}  # fmt: skip
# prompt tokens, completion tokens, completions
CASES = ((150, 200, 8), (1500, 250, 16), (8192, 512, 16), (32768, 1024, 16))
TOO_MUCH = 1e18  # of any setting of a plan: a float cannot count it

CHECKPOINTING = ("model.gradient_checkpointing=true",)
TILED = (*CHECKPOINTING, "model.tiled_mlp=2048")
OFFLOADED = (*TILED, "model.checkpoint_offload=true")
EIGHT_BIT, LORA = "optim.states=8bit", "model.lora={r: 16}"
OPTIONS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("as configured", ()),
    ("checkpointing", CHECKPOINTING),
    ("+ tiled MLP", TILED),
    ("+ tiled MLP, offload", OFFLOADED),
    ("checkpointing, 8-bit Adam", (*CHECKPOINTING, EIGHT_BIT)),
    ("+ tiled MLP, offload, 8-bit Adam", (*OFFLOADED, EIGHT_BIT)),
    ("checkpointing, LoRA r=16", (*CHECKPOINTING, LORA)),
    ("+ tiled MLP, offload, LoRA r=16", (*OFFLOADED, LORA)),
)


class PlanSettings(Section):
    """The settings of `grpo-fast plan` itself; every other `key=value` is the run's."""

    gpu: float | None = Field(None, gt=0, lt=TOO_MUCH)  # GB; None: of the GPU that is here
    prompt: int = Field(8192, ge=1, lt=TOO_MUCH)  # tokens
    completion: int | None = Field(None, ge=1, lt=TOO_MUCH)  # None: rollout.max_new_tokens
    group: int | None = Field(None, ge=1, lt=TOO_MUCH)  # None: rollout.group_size


class Case(NamedTuple):
    prompt: int
    completion: int
    group: int

    def tokens(self, shared: bool) -> int:
        one, two = (trunk_tokens(self.prompt, [self.completion] * n, shared=shared) for n in (1, 2))
        return one + (self.group - 1) * (two - one)


class Plan(NamedTuple):
    name: str
    shape: Shape
    gpu: float  # GB (10⁹ bytes)
    memory: list[tuple[str, Memory]]  # by options; the first is the configuration as it is
    cases: list[Case]
    dtypes: str

    @property
    def usable(self) -> float:
        """Bytes."""
        return USABLE_GPU * self.gpu * 1e9


def plan(model: str, settings: Sequence[str]) -> Plan:
    """Predict a model's memory under every set of options.

    Args:
        model: a recipe, a name of KNOWN_MODELS, a hub id, a model's folder, or a config.json.
        settings: gpu=GB, prompt=…, completion=…, group=…, and `key=value` of a run's configuration.

    Raises ValueError for something that is none of these, an unknown key, or no gpu.
    """
    own, words = own_words(PlanSettings, settings)
    run = _run_config(model, words)
    shape = Shape.of(*_config_and_parameters(run.model, run.data, model))
    rows, gpu = [], own.gpu or _gpu_here()
    for label, changes in OPTIONS:
        changed = _run_config(model, [*words, *changes])
        rows.append((label, predict_run(shape, changed, "cuda", int(gpu * 1e9))))
    rollout = run.rollout
    completion, group = own.completion or rollout.max_new_tokens, own.group or rollout.group_size
    wanted = Case(own.prompt, completion, group)
    cases = [wanted, *(Case(*case) for case in CASES if case != wanted)]
    kept, computed = run.model.dtype, run.model.autocast or run.model.dtype
    moments = "moments 8 bit" if run.optim.states == "8bit" else f"moments {kept}"
    dtypes = f"weights and gradients {kept}, {moments}, computed in {computed}"
    return Plan(model, shape, gpu, rows, cases, dtypes)


def render(plan: Plan) -> list[Any]:
    from rich.table import Table

    wanted, parameters = plan.cases[0], f"{plan.shape.parameters / 1e6:,.0f}M parameters"
    options = Table(
        title=f"{plan.name}: {parameters} on {plan.gpu:g} GB ({USABLE_GPU:.0%} planned with)",
        caption=f"{plan.dtypes}\n"
        "T: trunk tokens of one micro-batch = prompt + group · (completion − 1)",
    )
    for name in ("options", "fixed GB", "kB per token", "largest T"):
        options.add_column(name, justify="left" if name == "options" else "right")
    largest = f"largest prompt\n(C = {wanted.completion}, G = {wanted.group})"
    options.add_column(largest, justify="right")
    for label, memory in plan.memory:
        most = memory.tokens(plan.usable)
        prompt = max(0, most - wanted.tokens(True) + wanted.prompt)
        shown = (f"{number:,}" if number else "—" for number in (most, prompt))
        options.add_row(label, f"{memory.fixed / 1e9:.3g}", f"{memory.per_token / 1e3:.0f}", *shown)
    # The first set of options that holds a group of the wanted shape; the last one when none does.
    needed = wanted.tokens(True)
    enough = (row for row in plan.memory if row[1].peak(needed) <= plan.usable)
    label, memory = next(enough, plan.memory[-1])
    title, caption = f"Groups in one micro-batch · {label}", "packed: without sharing the prompt"
    fits = Table(title=title, caption=caption)
    for name in ("prompt", "completion", "group", "T shared", "T packed", "GB shared", "fits"):
        fits.add_column(name, justify="right")
    for case in plan.cases:
        tokens = case.tokens(True)
        fits.add_row(
            f"{case.prompt:,}", f"{case.completion:,}", str(case.group), f"{tokens:,}",
            f"{case.tokens(False):,}",
            f"{memory.peak(tokens, case.completion * case.group) / 1e9:.3g}",
            f"{memory.tokens(plan.usable) // tokens} groups",
        )  # fmt: skip
    return [options, fits]


def _run_config(model: str, words: Sequence[str]) -> RunConfig:
    if model in recipe_names() or model.endswith((".yaml", ".yml")):
        return load_settings(RunConfig, model, words, PlanSettings.model_fields)
    settings: dict[str, Any] = {
        "model": {"path": model, "autocast": "bfloat16"},  # as the recipes train
        "data": {"task": "gsm8k", "name": "openai/gsm8k"},
        "rewards": [{"name": "gsm8k_correct"}],
        "rollout": {"group_size": 16, "max_new_tokens": 512},
    }
    return read_words(RunConfig, words, settings, PlanSettings.model_fields)


def _config_and_parameters(model: ModelConfig, data: DataConfig, name: str) -> tuple[Any, int]:
    """The transformers config and the number of parameters, counted on a model without storage."""
    from transformers import AutoModelForCausalLM

    try:
        config = _transformers_config(model, data)
        with torch.device("meta"):
            empty = AutoModelForCausalLM.from_config(config)
    except Exception as error:  # every architecture's config has words, and classes, of its own
        if model.config is not None:
            kind = model.config["model_type"]
            raise ValueError(f"model.config: {kind} refuses it: {reason(error)}") from error
        raise ValueError(
            f"MODEL: expected a recipe, one of {', '.join(KNOWN_MODELS)}, a hub id, a model's "
            f"folder or its config.json, got {name!r} ({reason(error)})"
        ) from error
    return config.get_text_config(), sum(p.numel() for p in empty.parameters())


def _transformers_config(model: ModelConfig, data: DataConfig) -> Any:
    from transformers import AutoConfig

    if model.config is not None:
        check_fields(model.config)
        size = model.vocab_size
        if model.tokenizer == "symbols":
            size = len(task_symbols(data)) + 2  # pad and end
        return AutoConfig.for_model(**{"vocab_size": size, **model.config})
    path = str(model.path)
    if path.lower() in KNOWN_MODELS:
        return AutoConfig.for_model(**KNOWN_MODELS[path.lower()])
    if path.endswith(".json") and os.path.isfile(path):
        fields = json.loads(Path(path).read_text(encoding="utf-8"))
        if not isinstance(fields, dict) or "model_type" not in fields:
            raise ValueError(f"{path} has no model_type")
        check_fields(fields)
        return AutoConfig.for_model(**fields)
    check_files(path)
    read_fields(path, model.trust_remote_code)
    return AutoConfig.from_pretrained(path, trust_remote_code=model.trust_remote_code)


def _gpu_here() -> float:
    expected = "gpu=<GB of the GPU's memory>, for example gpu=141"
    require(torch.cuda.is_available(), "gpu", expected, "none, and there is no GPU here")
    return torch.cuda.get_device_properties(0).total_memory / 1e9
