"""Prediction of the memory of a training step from the sizes of the model.

The memory at the peak of a step is the sum of three parts:

- the fixed memory of weights, gradients, optimizer states and a reference copy
- the activations that autograd stores for the tokens of a micro-batch
- the temporary memory of the LM head or of one layer's backward pass, whichever is larger

Trunk tokens are the tokens that pass through the decoder layers. A prompt counts once, because its
completions share it.

In the following table, h is the hidden size, I the MLP size, q = heads·head_dim and kv =
kv_heads·head_dim. An activation has e bytes. Autograd stores these bytes per token and layer::

    two RMSNorms    e = 4: 24h (input, normalized, output)
                    e = 2: 16h (fp32 copy, normalized, output)
    attention       e·(2q + 2kv): q, k, v and output. Kernels store k and v without repeating heads.
    MLP             4·e·I: gate, silu(gate), up and their product

The recurrent layers of hybrid models store other tensors in place of those of the attention. Their
bytes are measured by running one layer on the meta device. The layers run in fp32 in any dtype. If
segments are much shorter than a layer's chunks, the layer stores up to a third more. Models whose
recurrent layers have no MLP (Nemotron-H) store less.

The backward pass of a layer needs e·(2I + 3h) more bytes per token.

With gradient checkpointing, a step stores only the input of each layer (e·h), and the activations
of one layer at a time. If q = h and kv = h/4, the backward pass of a layer then needs 27h + 12I
bytes per token at 16 bits.

With a tiled MLP, no tensor of size I is stored for all tokens. The backward pass of a layer needs
18h bytes per token at 16 bits and 16h at 32 bits. With the layer's activations, it needs 39h bytes
per token at 16 bits.

Tests compare these numbers with the tensors that autograd stores and with the peak that the
allocator reports.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import torch
import yaml
from pydantic import BeforeValidator, Field
from torch import Tensor, nn

from grpo_fast.attention.hybrid import recurrent_layers
from grpo_fast.data import reason
from grpo_fast.data.hub import check_fields, check_files, read_fields
from grpo_fast.data.splits import Splits
from grpo_fast.errors import require
from grpo_fast.kernels.workspace import workspace_bytes
from grpo_fast.rollout.own.model import positions
from grpo_fast.train.config import DataConfig, ModelConfig, Positive, RunConfig, Section
from grpo_fast.train.config.recipes import load_recipe, recipe_names
from grpo_fast.train.config.words import own_words, read_words

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

log = logging.getLogger(__name__)

USABLE_GPU = 0.9  # usable fraction of a GPU; fragmentation, rollouts and CUDA need the rest
USABLE_CPU = 0.5  # usable fraction of host memory; rollouts and other processes need the rest
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of a decoder model that determine its memory use."""

    layers: int
    hidden: int
    mlp: int
    query: int  # heads · head_dim
    kv: int  # kv_heads · head_dim
    vocab: int
    parameters: int
    recurrent_layers: int = 0
    recurrent_bytes: float = 0.0  # stored per token by one recurrent layer

    @classmethod
    def of(cls, lm: PreTrainedModel) -> Shape:
        """Read the sizes of a transformers model, which may be on the meta device.

        Raises:
            ValueError: the config lacks a field, so the architecture is not supported.
        """
        config = lm.config.get_text_config()
        for name in ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size"):
            if not isinstance(getattr(config, name, None), int):
                raise ValueError(f"{name}: the config of model_type {config.model_type!r} has none")
        heads = config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        mlp = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
        recurrent = recurrent_layers(lm)
        stored = stored_bytes(recurrent[0], config.hidden_size) if recurrent else 0.0
        return cls(
            config.num_hidden_layers, config.hidden_size, mlp, heads * head_dim,
            kv_heads * head_dim, config.vocab_size, sum(p.numel() for p in lm.parameters()),
            len(recurrent), stored,
        )  # fmt: skip


def stored_bytes(layer: nn.Module, hidden: int, tokens: int = 256) -> float:
    """Return the bytes per token that autograd stores for a layer in fp32.

    The layer runs on the meta device, which computes nothing and allocates no memory.

    Raises:
        ValueError: the layer does not run on the meta device.
    """
    named = [*layer.named_parameters(), *layer.named_buffers()]
    weights = {name: x.detach().to("meta", torch.float32) for name, x in named}
    own = {x.untyped_storage()._cdata for x in weights.values()}
    stored: dict[int, Tensor] = {}

    def note(x: Tensor) -> Tensor:
        stored[x.untyped_storage()._cdata] = x
        return x

    x = torch.empty(1, tokens, hidden, device="meta", requires_grad=True)
    try:
        with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
            torch.func.functional_call(layer, weights, (x,))
    except (RuntimeError, NotImplementedError, TypeError) as error:
        kind = type(layer).__name__
        raise ValueError(f"{kind}: its memory cannot be measured: {error}") from error
    kept = [x.untyped_storage().nbytes() for key, x in stored.items() if key not in own]
    return sum(kept) / tokens


@dataclasses.dataclass(frozen=True)
class Memory:
    """Predicted memory of a training step, as the sizes of its parts in bytes."""

    fixed: int  # weights, gradients, optimizer states and a reference copy
    # Temporary memory of the LM head: the buffer for the logits of one chunk, and the gradient of
    # the head's weight before it is added to `.grad`. With 16-bit activations, this also includes
    # an fp32 buffer that sums this gradient over all chunks.
    head: int
    kept_per_token: float  # per trunk token: activations of all layers for the backward pass
    working_per_token: float  # per trunk token: temporary memory of one layer's backward pass
    working: int  # one tile of the MLP, independent of the number of tokens

    @property
    def per_token(self) -> float:
        """Return the number of bytes per trunk token at the peak of the backward pass."""
        return self.kept_per_token + self.working_per_token

    def peak(self, tokens: int) -> int:
        """Return the peak memory, in bytes, of a micro-batch of `tokens` trunk tokens."""
        working = max(self.head, self.working + self.working_per_token * tokens)
        return math.ceil(self.fixed + self.kept_per_token * tokens + working)

    def tokens(self, limit: float) -> int:
        """Return the maximum number of trunk tokens for a memory limit in bytes."""
        room = limit - self.fixed
        with_head = (room - self.head) / self.kept_per_token if self.kept_per_token else math.inf
        return max(0, int(min(with_head, (room - self.working) / self.per_token)))


def predict(shape: Shape, config: RunConfig, device: str, gpu: int | None = None) -> Memory:
    """Predict the memory of a training step.

    A separate critic is assumed to have the same sizes as the policy.

    Args:
        shape: sizes of the policy.
        config: configuration of the run.
        device: "cpu" or "cuda". On the CPU, offloading of layer inputs saves no memory.
        gpu: memory of the GPU in bytes. None uses the memory of this machine's GPU.
    """
    # 1. Add up the weights, their gradients, Adam's two moments and the reference model. With
    # autocast, also add a 16-bit copy of the weights.
    model = config.model
    weight = DTYPE_BYTES[model.dtype]
    activation = DTYPE_BYTES[model.autocast or model.dtype]
    stored = weight + (activation if model.autocast else 0)
    trained = trainable_parameters(shape, model)
    fixed = shape.parameters * stored + 3 * trained * weight
    if config.critic is not None and config.critic.kind == "model":
        fixed *= 2
    if config.reference.kind != "none" and model.lora is None:
        fixed += shape.parameters * weight
    # 2. Compute the memory of the LM head.
    weights = 0 if model.lora is not None else shape.vocab * shape.hidden
    head = workspace_bytes(torch.device(device), memory=gpu) + weights * activation
    if activation < 4:
        head += 4 * weights
    return Memory(fixed, head, *_per_token(shape, model, activation, device == "cpu"))


def host_memory() -> int:
    """Return this machine's memory in bytes, or its container's memory limit if that is lower."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text(encoding="ascii").strip() if limit.is_file() else ""
    return min(total, int(text)) if text.isdigit() else total


def trainable_parameters(shape: Shape, model: ModelConfig) -> int:
    """Return the number of trained parameters. LoRA is assumed to cover all linear layers."""
    if model.lora is None:
        return shape.parameters
    h, i, q, kv = shape.hidden, shape.mlp, shape.query, shape.kv
    sides = (h + q) + 2 * (h + kv) + (q + h) + 3 * (h + i)
    return shape.layers * model.lora.r * sides


def _per_token(shape: Shape, model: ModelConfig, e: int, on_cpu: bool) -> tuple[float, float, int]:
    """Compute the memory that activations need.

    Args:
        shape: sizes of the model.
        model: the section `model` of the configuration.
        e: bytes of an activation.
        on_cpu: True if the model is on the CPU.

    Returns:
        The bytes per token that all layers store, the bytes per token that one layer needs in its
        backward pass, and the bytes of one tile of a tiled MLP.
    """
    h, i, layers = shape.hidden, shape.mlp, shape.layers
    norms = 16 * h if e == 2 else 6 * e * h
    attention = e * (2 * shape.query + 2 * shape.kv)
    mlp, backward, tile = 4 * e * i, e * (2 * i + 3 * h), 0
    # A tiled MLP stores nothing, because its input tiles are views of the output of the norm. The
    # backward pass recomputes one tile at a time.
    if model.tiled_mlp is not None:
        mlp, backward, tile = 0, 18 * h if e == 2 else 4 * e * h, model.tiled_mlp * 6 * e * i
    layer = norms + attention + mlp
    recurrent = norms + shape.recurrent_bytes + mlp
    if not model.gradient_checkpointing:
        count = shape.recurrent_layers
        return (layers - count) * layer + count * recurrent, backward, tile
    largest = max(layer, recurrent) if shape.recurrent_layers else layer
    stored = 0 if model.gradient_checkpointing == "offload" and not on_cpu else layers * e * h
    return stored, backward + largest, tile


def predict_model(lm: PreTrainedModel, config: RunConfig) -> Memory | None:
    """Predict the memory of a run with a loaded transformers model.

    Returns:
        The prediction, or None if the architecture is not supported.
    """
    try:
        shape = Shape.of(lm)
    except ValueError as error:
        said = "the memory cannot be predicted (%s): set tokens_per_microbatch if memory runs out"
        log.warning(said, error)
        return None
    return predict(shape, config, lm.device.type)


# -------------------------------------------------------------------------------------- The command
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
    """Settings of the command `grpo-fast plan`. All other arguments are settings of the run.

    Attributes:
        gpu: GPU memory in GB or a name such as H100; null uses this machine's GPU or main memory.
        prompt: Length of the prompt in tokens; null means 8,192, or what the model's positions
            leave.
        completion: Length of each completion in tokens; null means rollout.max_new_tokens.
        group: Number of completions per prompt; null means rollout.group_size.
    """

    gpu: Annotated[float | None, BeforeValidator(_by_name)] = Field(None, gt=0, lt=1e9)
    prompt: Positive | None = None
    completion: Positive | None = None
    group: Positive | None = None


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
