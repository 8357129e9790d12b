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
from typing import TYPE_CHECKING, Annotated, Any

import torch
import yaml
from pydantic import BeforeValidator, Field
from torch import Tensor, nn

from grpo_fast.attention.hybrid import recurrent_layers
from grpo_fast.data.splits import Splits
from grpo_fast.errors import reason, require
from grpo_fast.kernels.workspace import workspace_bytes
from grpo_fast.rollout.own.model import positions
from grpo_fast.train import ranks
from grpo_fast.train.config import (
    DataConfig,
    ModelConfig,
    Positive,
    RunConfig,
    read_recipe,
    recipe_names,
)
from grpo_fast.train.config.words import read_words
from grpo_fast.train.policy import check_model_config, read_model_config

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

log = logging.getLogger(__name__)

UNLIMITED = 1 << 40  # number of tokens
# Fraction of the memory that a step may use. On a GPU, fragmentation, rollouts and CUDA need the
# rest. On the CPU, rollouts and other processes need the rest.
USABLE = {"cuda": 0.9, "cpu": 0.5}
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


def memory_of(device: torch.device) -> int:
    """Return the memory of a GPU or of this machine in bytes, within its container's limit."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
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


def token_budget(lm: PreTrainedModel, config: RunConfig) -> int:
    """Return the number of trunk tokens of a micro-batch that fit into memory on every rank.

    The result depends only on the model and the machine, not on the memory that other processes
    use, so that a repeated run packs the same batches. If the memory of the architecture cannot be
    predicted, the budget is unlimited.
    """
    device = lm.device
    try:
        memory = predict(Shape.of(lm), config, device.type)
    except ValueError as error:
        said = "the memory cannot be predicted (%s): set tokens_per_microbatch if memory runs out"
        log.warning(said, error)
        return UNLIMITED
    limit = USABLE[device.type] * memory_of(device)
    tokens = memory.tokens(limit)
    if tokens == 0:
        log.warning(
            "memory: a step needs %.1f GB without any token (predicted), %.1f GB are usable; "
            "trying one completion at a time", (memory.fixed + memory.head) / 1e9, limit / 1e9,
        )  # fmt: skip
    return min(ranks.gather(max(tokens, 1)))


# -------------------------------------------------------------------------------------- The command
KNOWN_MODELS: dict[str, dict[str, Any]] = yaml.safe_load(
    Path(__file__).with_name("known.yaml").read_text(encoding="utf-8")
)

# Sets of settings that the plan compares, as they are written in a shell. Each is a row.
OPTIONS = (
    "",
    "model.gradient_checkpointing=true",
    "model.gradient_checkpointing=true model.tiled_mlp=2048",
    "model.gradient_checkpointing=offload model.tiled_mlp=2048",
    "model.gradient_checkpointing=true 'model.lora={r: 16}'",
    "model.gradient_checkpointing=offload model.tiled_mlp=2048 'model.lora={r: 16}'",
)


def _gigabytes(value: Any) -> Any:
    if isinstance(value, str):  # the name of a GPU
        raise ValueError("expected GB of memory, such as gpu=80")
    return value


class PlanSettings(RunConfig):
    """Settings of the command `grpo-fast plan`, in addition to the settings of a run.

    Attributes:
        gpu: GPU memory in GB; null uses the memory of this machine's GPU or its main memory.
        prompt: Length of the prompt in tokens; null means 8,192, or what the model's positions
            leave.
    """

    gpu: Annotated[float | None, BeforeValidator(_gigabytes)] = Field(None, gt=0, lt=1e9)
    prompt: Positive | None = None


def plan(model: str, settings: Sequence[str]) -> list[str]:
    """Predict how many tokens fit into memory for every set of settings in `OPTIONS`.

    A group is a prompt with its completions. The completions share the prompt, so its tokens count
    once. The last token of a completion is not an input of the model.

    Args:
        model: a recipe, a name in KNOWN_MODELS, a hub id, a model's folder, or its config.json.
        settings: fields of `PlanSettings`, each as key=value, for example gpu=80.

    Returns:
        Lines that describe the model and a group, and one line for each set of settings.

    Raises:
        ValueError: the model is not found, or a setting is invalid.
    """
    # 1. Read the settings, and build the model without weights.
    run = _plan_settings(model, settings)
    lm = _empty_model(run.model, run.data, run.model.path or model)
    shape = Shape.of(lm)
    device = torch.device("cuda" if run.gpu or torch.cuda.is_available() else "cpu")
    total = run.gpu * 1e9 if run.gpu else memory_of(device)
    usable = USABLE[device.type] * total
    # 2. Check that a group fits into the positions of the model.
    length, size = run.rollout.max_new_tokens, run.rollout.group_size
    limit = positions(lm.config.get_text_config())
    longest = limit - length + 1
    expected = f"at most {longest:,} with completions of {length:,} ({limit:,} positions)"
    prompt = run.prompt or int(min(8192, longest))
    require(1 <= prompt <= longest, "prompt", expected, f"{prompt:,}")
    group = prompt + size * (length - 1)
    # 3. Format a line for each set of settings.
    where = "" if device.type == "cuda" else " of this machine, which has no GPU,"
    millions = shape.parameters / 1e6
    count = f"{millions:,.0f}" if millions >= 10 else f"{millions:.2g}"
    share = f"({usable / total:.0%} usable)"
    lines = [
        f"{model}: {count}M parameters in {total / 1e9:.3g} GB{where} {share}",
        f"a group has a prompt of {prompt:,} tokens and {size} completions of {length:,}",
        "tokens: largest micro-batch; prompt: longest of one group; groups: in one micro-batch",
        "fixed GB  kB/token      tokens      prompt  groups  settings",
    ]
    for changes in OPTIONS:
        config = _plan_settings(model, [*settings, *shlex.split(changes)])
        memory = predict(shape, config, device.type, int(total))
        most = memory.tokens(usable)
        room = int(min(longest, max(0, most - group + prompt)))
        sizes = f"{memory.fixed / 1e9:8.3g}  {memory.per_token / 1e3:8.0f}"
        shown = changes or "as configured"
        lines.append(f"{sizes}  {most:10,}  {room:10,}  {most // group:6,}  {shown}")
    return lines


def _plan_settings(model: str, words: Sequence[str]) -> PlanSettings:
    settings: dict[str, Any] = {
        "model": {"path": model, "autocast": "bfloat16"},  # as in the recipes
        "data": {"task": "gsm8k", "path": "openai/gsm8k"},
        "rewards": [{"name": "gsm8k_correct"}],
        "rollout": {"group_size": 16, "max_new_tokens": 512},
    }
    if model in recipe_names() or model.endswith((".yaml", ".yml")):
        settings = read_recipe(model)
    return read_words(PlanSettings, words, settings)


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
        read_model_config(path, model.trust_remote_code)
        return AutoConfig.from_pretrained(path, trust_remote_code=model.trust_remote_code)
    check_model_config(fields)
    size = model.vocab_size
    if model.tokenizer == "symbols":
        size = len(Splits(data, 0).symbols()) + 2  # the tokens PAD and EOS
    return AutoConfig.for_model(**{"vocab_size": size, **fields})
