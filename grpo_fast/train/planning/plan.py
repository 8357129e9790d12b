"""`grpo-fast plan`: what fits on a GPU, by the memory model, without loading any weights."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
from pydantic import BeforeValidator, Field

from grpo_fast.attention import trunk_tokens
from grpo_fast.data import reason, task_symbols
from grpo_fast.data.hub import check_fields, check_files, read_fields
from grpo_fast.train.config import DataConfig, ModelConfig, RunConfig, Section
from grpo_fast.train.config.recipes import load_settings, recipe_names
from grpo_fast.train.config.words import own_words, read_words
from grpo_fast.train.planning.memory_model import (
    USABLE_CPU,
    USABLE_GPU,
    Memory,
    Shape,
    host_memory,
    predict_run,
)

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
GPUS = {  # GB
    "A10": 24, "A100": 80, "A100-40GB": 40, "A100-80GB": 80, "A6000": 48, "B200": 180, "GH200": 96,
    "H100": 80, "H20": 96, "H200": 141, "L4": 24, "L40": 48, "L40S": 48, "MI250": 128,
    "MI300X": 192, "RTX3090": 24, "RTX4090": 24, "RTX5090": 32, "T4": 16, "V100": 32,
}  # fmt: skip
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


def _by_name(value: Any) -> Any:
    """Return the GB of a GPU's name; a number, also one with its unit, stays a number."""
    if not isinstance(value, str):
        return value
    name = re.sub(r"nvidia|amd|geforce|tesla|[\s_-]", "", value.casefold())
    by_name = {known.casefold().replace("-", ""): gb for known, gb in GPUS.items()}
    number = name.removesuffix("gb")
    expected = f"expected the GB of the GPU's memory (gpu=80), or one of {', '.join(GPUS)}"
    if name not in by_name and not number.isdecimal():
        raise ValueError(expected)
    return by_name[name] if name in by_name else float(number[:20])


class PlanSettings(Section):
    """The settings of `grpo-fast plan` itself; every other `key=value` is the run's."""

    gpu: Annotated[float | None, BeforeValidator(_by_name)] = Field(None, gt=0, lt=TOO_MUCH)
    """Memory in GB, or a name such as H100; null means this machine's GPU, else its memory."""
    prompt: int = Field(8192, ge=1, lt=TOO_MUCH)
    """Tokens of the prompt."""
    completion: int | None = Field(None, ge=1, lt=TOO_MUCH)
    """Tokens of a completion; null means rollout.max_new_tokens."""
    group: int | None = Field(None, ge=1, lt=TOO_MUCH)
    """Completions of a prompt; null means rollout.group_size."""


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
    device: str  # "cuda" or "cpu"
    gb: float  # of the device, 10⁹ bytes
    memory: list[tuple[str, Memory]]  # by options; the first is the configuration as it is
    cases: list[Case]
    dtypes: str

    @property
    def share(self) -> float:
        """The fraction of the memory that is planned with."""
        return USABLE_GPU if self.device == "cuda" else USABLE_CPU

    @property
    def usable(self) -> float:
        """The bytes that are planned with."""
        return self.share * self.gb * 1e9

    @property
    def ranked(self) -> list[tuple[str, Memory]]:
        """The sets of options, those first that hold a group of the wanted shape."""
        needed = self.cases[0].tokens(True)
        return sorted(self.memory, key=lambda row: row[1].peak(needed) > self.usable)

    @property
    def verdict(self) -> str:
        """One sentence: what fits, and by which settings."""
        (label, memory), wanted = self.ranked[0], self.cases[0]
        what = (
            f"a prompt of {wanted.prompt:,} tokens with {wanted.group} completions of "
            f"{wanted.completion:,}"
        )
        needed = wanted.tokens(True)
        if memory.peak(needed) > self.usable:
            gb = min(row[1].peak(needed) for row in self.memory) / 1e9
            short = f"{gb:.3g} GB are needed, {self.usable / 1e9:.3g} GB are planned with"
            return f"No set of options holds {what}: {short}."
        words = " ".join(shlex.quote(word) for word in dict(OPTIONS)[label])
        with_them = f"with {words}" if words else "as configured"
        return f"{self.name} fits {with_them}: {memory.tokens(self.usable) // needed} times {what}."


def plan(model: str, settings: Sequence[str]) -> Plan:
    """Predict a model's memory under every set of options.

    Args:
        model: a recipe, a name of KNOWN_MODELS, a hub id, a model's folder, or a config.json.
        settings: gpu=GB or gpu=NAME, prompt=…, completion=…, group=…, and `key=value` of a run's
            configuration.

    Raises:
        ValueError: something that is none of these, or an unknown key.
    """
    own, words = own_words(PlanSettings, settings)
    run = _run_config(model, words)
    shape = Shape.of(*_config_and_parameters(run.model, run.data, model))
    device = "cuda" if own.gpu or torch.cuda.is_available() else "cpu"
    gb = own.gpu or _memory_here()
    rows = []
    for label, changes in OPTIONS:
        changed = _run_config(model, [*words, *changes])
        rows.append((label, predict_run(shape, changed, device, int(gb * 1e9))))
    rollout = run.rollout
    completion, group = own.completion or rollout.max_new_tokens, own.group or rollout.group_size
    wanted = Case(own.prompt, completion, group)
    cases = [wanted, *(Case(*case) for case in CASES if case != wanted)]
    kept, computed = run.model.dtype, run.model.autocast or run.model.dtype
    moments = "moments 8 bit" if run.optim.states == "8bit" else f"moments {kept}"
    dtypes = f"weights and gradients {kept}, {moments}, computed in {computed}"
    return Plan(model, shape, device, gb, rows, cases, dtypes)


def render(plan: Plan) -> list[Any]:
    from rich.table import Table

    wanted, parameters = plan.cases[0], f"{plan.shape.parameters / 1e6:,.0f}M parameters"
    where = "" if plan.device == "cuda" else " of this machine, which has no GPU,"
    options = Table(
        title=f"{plan.name}: {parameters} in {plan.gb:.3g} GB{where} "
        f"({plan.share:.0%} planned with)",
        caption=f"{plan.dtypes}\n"
        "T: trunk tokens of one micro-batch = prompt + group · (completion − 1)",
    )
    for name in ("options", "fixed GB", "kB per token", "largest T"):
        options.add_column(name, justify="left" if name == "options" else "right")
    largest = f"largest prompt\n(C = {wanted.completion}, G = {wanted.group})"
    options.add_column(largest, justify="right")
    for label, memory in plan.ranked:
        most = memory.tokens(plan.usable)
        prompt = max(0, most - wanted.tokens(True) + wanted.prompt)
        shown = (f"{number:,}" if number else "—" for number in (most, prompt))
        options.add_row(label, f"{memory.fixed / 1e9:.3g}", f"{memory.per_token / 1e3:.0f}", *shown)
    label, memory = plan.ranked[0]
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
    return [options, fits, plan.verdict]


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


def _memory_here() -> float:
    """Return the GB of this machine's GPU, or of its main memory if it has no GPU."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_properties(0).total_memory / 1e9
    return host_memory() / 1e9
