"""Memory plan for a training step, computed without loading any weights (`grpo-fast plan`)."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import torch
import yaml
from pydantic import BeforeValidator, Field

from grpo_fast.data import reason
from grpo_fast.data.hub import check_fields, check_files, read_fields
from grpo_fast.data.splits import Splits
from grpo_fast.errors import require
from grpo_fast.rollout.own.model import positions
from grpo_fast.train.config import DataConfig, ModelConfig, Positive, RunConfig, Section
from grpo_fast.train.config.recipes import load_recipe, recipe_names
from grpo_fast.train.config.words import own_words, read_words
from grpo_fast.train.planning.memory_model import (
    USABLE_CPU,
    USABLE_GPU,
    Memory,
    Shape,
    host_memory,
    predict,
)

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

_KNOWN = yaml.safe_load(Path(__file__).with_name("known.yaml").read_text(encoding="utf-8"))
GPUS: dict[str, float] = _KNOWN["gpus"]
KNOWN_MODELS: dict[str, dict[str, Any]] = _KNOWN["models"]

CHECKPOINTING = "model.gradient_checkpointing=true"
OFFLOAD = "model.gradient_checkpointing=offload"
TILED = "model.tiled_mlp=2048"
LORA = "model.lora={r: 16}"
# Sets of options that the plan compares: the label of a table row, and the settings of the row.
OPTIONS: dict[str, tuple[str, ...]] = {
    "as configured": (),
    "checkpointing": (CHECKPOINTING,),
    "+ tiled MLP": (CHECKPOINTING, TILED),
    "+ tiled MLP, offload": (OFFLOAD, TILED),
    "checkpointing, LoRA r=16": (CHECKPOINTING, LORA),
    "+ tiled MLP, offload, LoRA r=16": (OFFLOAD, TILED, LORA),
}


def _by_name(value: Any) -> Any:
    """Convert the name of a GPU to its memory in GB. Return a number unchanged."""
    if not isinstance(value, str):
        return value
    known = {name.casefold(): gb for name, gb in GPUS.items()}
    if value.casefold() not in known:
        raise ValueError(f"expected the GB of a GPU's memory (gpu=80), or one of {', '.join(GPUS)}")
    return known[value.casefold()]


class PlanSettings(Section):
    """Settings of the command `grpo-fast plan`. All other arguments are settings of the run."""

    gpu: Annotated[float | None, BeforeValidator(_by_name)] = Field(None, gt=0, lt=1e9)
    """GPU memory in GB or a name such as H100; null uses this machine's GPU or main memory."""
    prompt: Positive | None = None
    """Length of the prompt in tokens; null means 8,192, or what the model's positions leave."""
    completion: Positive | None = None
    """Length of each completion in tokens; null means rollout.max_new_tokens."""
    group: Positive | None = None
    """Number of completions per prompt; null means rollout.group_size."""


class Plan(NamedTuple):
    """Predicted memory of a model for each set of options in `OPTIONS`."""

    name: str
    shape: Shape
    device: str  # "cuda" or "cpu"
    gb: float  # memory of the device, in 10⁹ bytes
    memory: dict[str, Memory]  # keyed by the label of the options, "as configured" first
    prompt: int  # length of the prompt in tokens
    completion: int  # length of each completion in tokens
    size: int  # number of completions per prompt
    room: float  # largest prompt that leaves enough positions of the model for a completion

    @property
    def tokens(self) -> int:
        """Return the number of trunk tokens of a group, which is a prompt with its completions.

        The completions share the prompt, so it counts once. The last token of a completion is not
        an input of the model.
        """
        return self.prompt + self.size * (self.completion - 1)

    @property
    def usable(self) -> float:
        """Return the number of bytes that the plan may use."""
        return (USABLE_GPU if self.device == "cuda" else USABLE_CPU) * self.gb * 1e9

    def groups(self, options: str) -> int:
        """Return the number of groups that fit into one micro-batch with these options."""
        return self.memory[options].tokens(self.usable) // self.tokens

    @property
    def fits(self) -> bool:
        """Return whether at least one group fits into memory with some of the options."""
        return any(map(self.groups, self.memory))

    @property
    def verdict(self) -> str:
        """Return a sentence with the first set of options for which a group fits into memory."""
        completions = f"{self.size} completions of {self.completion:,}"
        group = f"a prompt of {self.prompt:,} tokens with {completions}"
        best = next(filter(self.groups, self.memory), None)
        if best is None:
            gb = min(memory.peak(self.tokens) for memory in self.memory.values()) / 1e9
            short = f"needs at least {gb:.3g} GB, and {self.usable / 1e9:.3g} GB are usable"
            return f"{self.name} does not fit: {group} {short}."
        words = " ".join(shlex.quote(word) for word in OPTIONS[best])
        with_them = f"with {words}" if words else "as configured"
        groups = f"{self.groups(best)} groups in a micro-batch, each of {group}"
        return f"{self.name} fits {with_them}: {groups}."


def plan(model: str, settings: Sequence[str]) -> Plan:
    """Predict a model's memory for every set of options in `OPTIONS`.

    Args:
        model: a recipe, a name in KNOWN_MODELS, a hub id, a model's folder, or its config.json.
        settings: fields of `PlanSettings` and of `RunConfig`, each as key=value, for example
            gpu=H100.

    Raises:
        ValueError: the model is not found, or a setting is invalid.
    """
    own, words = own_words(PlanSettings, settings)
    run = _run_config(model, words)
    lm = _empty_model(run.model, run.data, run.model.path or model)
    shape = Shape.of(lm)
    device = "cuda" if own.gpu or torch.cuda.is_available() else "cpu"
    gb = own.gpu or host_memory() / 1e9
    if not own.gpu and device == "cuda":
        gb = torch.cuda.get_device_properties(0).total_memory / 1e9
    memory = {}
    for label, changes in OPTIONS.items():
        changed = _run_config(model, [*words, *changes])
        memory[label] = predict(shape, changed, device, int(gb * 1e9))
    completion = own.completion or run.rollout.max_new_tokens
    size = own.group or run.rollout.group_size
    limit = positions(lm.config.get_text_config())
    room = limit - completion + 1  # the last token of a completion is not an input
    expected = f"at most {room:,} with completions of {completion:,} ({limit:,} positions)"
    prompt = own.prompt or int(min(8192, room))
    require(1 <= prompt <= room, "prompt", expected, f"{prompt:,}")
    return Plan(model, shape, device, gb, memory, prompt, completion, size, room)


def render(plan: Plan) -> list[object]:
    """Return what `rich` prints for a plan: a table and the sentence `plan.verdict`."""
    from rich.table import Table

    where = "" if plan.device == "cuda" else " of this machine, which has no GPU,"
    millions = plan.shape.parameters / 1e6
    count = f"{millions:,.0f}" if millions >= 10 else f"{millions:.2g}"
    table = Table(
        title=f"{plan.name}: {count}M parameters in {plan.gb:.3g} GB"
        f"{where} ({plan.usable / plan.gb / 1e9:.0%} usable)",
        caption="tokens: of one micro-batch, prompt + group · (completion − 1) for each group",
    )
    table.add_column("options")
    # Break the headers into short lines. In a terminal of 80 columns, long headers would leave too
    # little room for the labels of the options.
    largest = f"largest prompt\nC={plan.completion}, G={plan.size}"
    for name in ("fixed GB", "kB per\ntoken", "largest\ntokens", largest, "groups"):
        table.add_column(name, justify="right")
    # List the options that leave room for at least one group first.
    for label in sorted(plan.memory, key=lambda label: plan.groups(label) == 0):
        memory = plan.memory[label]
        most = memory.tokens(plan.usable)
        prompt = int(min(plan.room, max(0, most - plan.tokens + plan.prompt)))
        shown = (f"{number:,}" if number else "—" for number in (most, prompt, plan.groups(label)))
        table.add_row(label, f"{memory.fixed / 1e9:.3g}", f"{memory.per_token / 1e3:.0f}", *shown)
    return [table, plan.verdict]


def _run_config(model: str, words: Sequence[str]) -> RunConfig:
    if model in recipe_names() or model.endswith((".yaml", ".yml")):
        return load_recipe(model, words, PlanSettings.model_fields)
    settings: dict[str, Any] = {
        "model": {"path": model, "autocast": "bfloat16"},  # as in the recipes
        "data": {"task": "gsm8k", "path": "openai/gsm8k"},
        "rewards": [{"name": "gsm8k_correct"}],
        "rollout": {"group_size": 16, "max_new_tokens": 512},
    }
    return read_words(RunConfig, words, settings, PlanSettings.model_fields)


def _empty_model(model: ModelConfig, data: DataConfig, name: str) -> PreTrainedModel:
    """Build a model on the meta device, so that no weights are allocated.

    Args:
        model: the section `model` of the configuration.
        data: the section `data`, whose words determine the vocabulary of a symbol tokenizer.
        name: the model on the command line, for the error message.
    """
    from transformers import AutoModelForCausalLM

    try:
        config = _transformers_config(model, data)
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config)
    except Exception as error:  # exception classes differ between architectures
        raise ValueError(
            f"MODEL: expected a recipe, one of {', '.join(KNOWN_MODELS)}, a hub id, a model's "
            f"folder or its config.json, got {name!r} ({reason(error)})"
        ) from error


def _transformers_config(model: ModelConfig, data: DataConfig) -> PreTrainedConfig:
    from transformers import AutoConfig

    path = str(model.path)
    fields = KNOWN_MODELS.get(path.lower(), model.config)
    if fields is None:
        check_files(path)
        read_fields(path, model.trust_remote_code)
        return AutoConfig.from_pretrained(path, trust_remote_code=model.trust_remote_code)
    check_fields(fields)
    size = model.vocab_size
    if model.tokenizer == "symbols":
        size = len(Splits(data, 0).symbols()) + 2  # the tokens PAD and EOS
    return AutoConfig.for_model(**{"vocab_size": size, **fields})
