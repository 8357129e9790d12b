"""Predict a training step's memory from the shape of the model.

The peak of a step has three parts:

- fixed memory for weights, gradients, optimizer states and a reference copy
- the activations of T trunk tokens
- the larger of the head's workspace and the backward pass of one layer

A decoder layer has width h, MLP width I, q = heads·head_dim and kv = kv_heads·head_dim. If an
activation has e bytes, autograd stores the following bytes per token and layer::

    two RMSNorms    e = 4: 24h (input, normalized, output)
                    e = 2: 16h (fp32 copy, normalized, output)
    attention       e·(2q + 2kv): q, k, v and output. Kernels store k and v without repeating heads.
    MLP             4·e·I: gate, silu(gate), up and their product

The backward pass of a layer needs e·(2I + 3h) in addition. With gradient checkpointing a step
stores e·h for each layer, and all activations of one layer at a time. At 16 bits these are 27h +
12I if q = h and kv is small. With a tiled MLP no tensor of size I remains. The backward pass then
needs 18h at 16 bits (39h including the layer's activations) and 16h at 32 bits. Deep trees of
recorded samples can need a quarter more. Tests compare these numbers with the tensors that autograd
stores and with the peak of the allocator.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from grpo_fast.kernels.head.chunks import TARGET_SHARE
from grpo_fast.kernels.workspace import workspace_bytes
from grpo_fast.train.config import LoraConfig, ModelConfig, OptimConfig, RunConfig

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

log = logging.getLogger(__name__)

SMALL = 1_000_000  # with fewer parameters, an unknown architecture gives no warning
USABLE_GPU = 0.9  # usable fraction of a GPU; fragmentation, rollouts and CUDA need the rest
USABLE_CPU = 0.5  # usable fraction of host memory; rollouts and other processes need the rest
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}
STATE_BYTES_8BIT = 2 * (1 + 4 / 256)  # two moments of one byte and an fp32 scale per block of 256


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of a decoder model."""

    layers: int
    hidden: int
    mlp: int
    query: int  # heads · head_dim
    kv: int  # kv_heads · head_dim
    vocab: int
    parameters: int
    tied: bool

    @classmethod
    def of(cls, config: PreTrainedConfig, parameters: int) -> Shape:
        """Return the shape that a transformers config describes.

        Args:
            config: the config of the text model.
            parameters: number of parameters of the model.

        Raises:
            ValueError: the config lacks a field.
        """
        for name in ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size"):
            if not isinstance(getattr(config, name, None), int):
                raise ValueError(f"{name}: the config of model_type {config.model_type!r} has none")
        heads = config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        mlp = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
        tied = bool(getattr(config, "tie_word_embeddings", False))
        return cls(
            config.num_hidden_layers, config.hidden_size, mlp, heads * head_dim,
            kv_heads * head_dim, config.vocab_size, parameters, tied,
        )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Memory:
    """Memory of a training step in bytes, divided into its parts."""

    fixed: int  # bytes of weights, gradients, optimizer states and a reference copy
    logits: int  # bytes of the head's largest workspace
    logits_row: int  # bytes of this workspace for one completion token
    head_gradient: int  # bytes of the head's new gradient, before it is added to `.grad`
    head_sum: int  # bytes of the fp32 sum of the head's gradients over chunks
    one_chunk_rows: int  # most completion tokens that fit into one chunk and need no fp32 sum
    kept_per_token: float  # bytes that all layers store until the backward pass
    working_per_token: float  # bytes that one layer needs in its backward pass
    working: int  # bytes for one MLP tile, independent of the number of tokens

    @property
    def per_token(self) -> float:
        """Number of bytes per trunk token at the peak of the backward pass."""
        return self.kept_per_token + self.working_per_token

    @property
    def head(self) -> int:
        """Largest number of bytes that the head needs in addition to the trunk's activations."""
        return self.logits + self.head_gradient + self.head_sum

    def peak(self, tokens: int, rows: int | None = None) -> int:
        """Return the number of bytes at the peak of a micro-batch.

        Args:
            tokens: number of trunk tokens.
            rows: number of completion tokens. None assumes enough tokens to fill the head's
                workspace.
        """
        head = self.head
        if rows is not None:
            logits = rows * self.logits_row
            if rows > self.one_chunk_rows:
                logits = min(self.logits, logits) + self.head_sum
            head = logits + self.head_gradient
        working = max(head, self.working + self.working_per_token * tokens)
        return math.ceil(self.fixed + self.kept_per_token * tokens + working)

    def tokens(self, limit: float) -> int:
        """Return the largest number of trunk tokens for which `peak` is at most `limit` bytes."""
        room = limit - self.fixed
        with_head = (room - self.head) / self.kept_per_token if self.kept_per_token else math.inf
        return max(0, int(min(with_head, (room - self.working) / self.per_token)))


def predict(
    shape: Shape,
    model: ModelConfig,
    optim: OptimConfig,
    *,
    device: str,
    reference: bool = False,
    critic: bool = False,
    gpu: int | None = None,
) -> Memory:
    """Predict the memory of a training step.

    Args:
        shape: sizes of the model.
        model: the section `model` of the configuration.
        optim: the section `optim` of the configuration.
        device: "cpu" or "cuda". On the CPU, offloading checkpoints saves no memory.
        reference: True if a copy of the weights is stored for the KL term.
        critic: True if a separate critic of the policy's shape is trained, too.
        gpu: memory of the GPU in bytes. None uses the memory of this machine's GPU.
    """
    # 1. Weights (autocast keeps a 16-bit copy), gradients, optimizer states and a reference.
    weight = DTYPE_BYTES[model.dtype]
    activation = DTYPE_BYTES[model.autocast or model.dtype]
    stored = weight + (activation if model.autocast else 0)
    states = {"full": 2.0 * weight, "8bit": STATE_BYTES_8BIT, "offload": 0.0}[optim.states]
    trained = trainable_parameters(shape, model)
    fixed = shape.parameters * stored + int(trained * (weight + states))
    if critic:
        fixed *= 2
    if reference and model.lora is None:
        fixed += shape.parameters * weight
    # 2. The head's workspace and its gradient. On a GPU, 16-bit exponentials are stored, and few
    # rows fit into one chunk, whose gradient needs no fp32 sum.
    head = 0 if model.lora is not None else shape.vocab * shape.hidden
    head_sum = 4 * head if activation < 4 else 0
    logits = workspace_bytes(torch.device(device), memory=gpu)
    row = 4 * shape.vocab
    one_chunk_rows = 0
    if device == "cuda" and (model.autocast or model.dtype) == "bfloat16":
        row = 2 * shape.vocab
        if head_sum:
            one_chunk_rows = min((logits + head_sum) // row, int(TARGET_SHARE * shape.vocab))
    kept, working, tile = _per_token(shape, model, activation, device == "cpu")
    return Memory(
        fixed, logits, row, head * activation, head_sum, one_chunk_rows, kept, working, tile
    )


def host_memory() -> int:
    """Return the size of this machine's memory in bytes, or the limit of its container."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text(encoding="ascii").strip() if limit.is_file() else ""
    return min(total, int(text)) if text.isdigit() else total


def trainable_parameters(shape: Shape, model: ModelConfig) -> int:
    """Return the number of trained parameters. LoRA is assumed on all linear layers."""
    if model.lora is None:
        return shape.parameters
    h, i, q, kv = shape.hidden, shape.mlp, shape.query, shape.kv
    sides = (h + q) + 2 * (h + kv) + (q + h) + 3 * (h + i)
    return shape.layers * model.lora.r * sides


def _per_token(shape: Shape, model: ModelConfig, e: int, on_cpu: bool) -> tuple[float, float, int]:
    """Return the memory per token and of one MLP tile, in bytes.

    Returns:
        The bytes per token that all layers store, the bytes per token that the layer in its
        backward pass needs, and the bytes of one MLP tile.
    """
    h, i, layers = shape.hidden, shape.mlp, shape.layers
    norms = 16 * h if e == 2 else 6 * e * h
    attention = e * (2 * shape.query + 2 * shape.kv)
    mlp, backward, tile = 4 * e * i, e * (2 * i + 3 * h), 0
    # The tiles are views of the norm's output, and the backward pass recomputes one tile at a time.
    if model.tiled_mlp is not None:
        mlp, backward, tile = 0, 18 * h if e == 2 else 4 * e * h, model.tiled_mlp * 6 * e * i
    layer = norms + attention + mlp
    if not model.gradient_checkpointing:
        return layers * layer, backward, tile
    stored = 0 if model.gradient_checkpointing == "offload" and not on_cpu else layers * e * h
    return stored, backward + layer, tile


def predict_run(shape: Shape, config: RunConfig, device: str, gpu: int | None = None) -> Memory:
    """Predict the memory of a run. A separate critic model is assumed to have the policy's shape.

    Args:
        shape: sizes of the policy.
        config: configuration of the run.
        device: "cpu" or "cuda".
        gpu: memory of the GPU in bytes. None uses the memory of this machine's GPU.
    """
    return predict(
        shape, config.model, config.optim, device=device, gpu=gpu,
        reference=config.reference.kind != "none",
        critic=config.critic is not None and config.critic.kind == "model",
    )  # fmt: skip


def predict_model(lm: PreTrainedModel, config: RunConfig) -> Memory | None:
    """Predict the memory of a run with a loaded transformers model.

    Returns:
        The prediction, or None if the architecture is not supported.
    """
    parameters = sum(p.numel() for p in lm.parameters())
    try:
        shape = Shape.of(lm.config.get_text_config(), parameters)
    except ValueError as error:
        said = "no memory model for this architecture (%s): one micro-batch until memory runs out"
        log.log(logging.INFO if parameters < SMALL else logging.WARNING, said, error)
        return None
    ranks = [max(m.r.values()) for m in lm.modules() if hasattr(m, "lora_A")]
    if ranks and config.model.lora is None:  # then the model's path is an adapter
        model = config.model.model_copy(update={"lora": LoraConfig(r=max(ranks))})
        config = config.model_copy(update={"model": model})
    return predict_run(shape, config, lm.device.type)
