"""Prediction of a training step's memory from the sizes of the model.

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

The backward pass of a layer needs e·(2I + 3h) more bytes per token.

With gradient checkpointing, a step stores only the input of each layer (e·h), and the activations
of one layer at a time. If q = h and kv is small, a layer in its backward pass then needs 27h + 12I
at 16 bits.

With a tiled MLP, no tensor of size I is stored for all tokens. The backward pass of a layer needs
18h at 16 bits (39h including the layer's activations) and 16h at 32 bits.

Deep trees of recorded samples can need a quarter more. Tests compare these numbers with the tensors
that autograd stores and with the peak that the allocator reports.
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
from grpo_fast.train.config import LoraConfig, ModelConfig, RunConfig

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

log = logging.getLogger(__name__)

# A model of unknown architecture logs a warning only if it has at least this many parameters.
SMALL = 1_000_000
USABLE_GPU = 0.9  # usable fraction of a GPU; fragmentation, rollouts and CUDA need the rest
USABLE_CPU = 0.5  # usable fraction of host memory; rollouts and other processes need the rest
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of a decoder model that determine its memory."""

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
        """Read the sizes of a model from its transformers config.

        Args:
            config: the config of the text model.
            parameters: number of parameters of the model.

        Raises:
            ValueError: the config lacks a field, so the architecture is not supported.
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
    """Predicted memory of a training step in bytes, divided into parts."""

    fixed: int  # weights, gradients, optimizer states and a reference copy
    logits: int  # the LM head's buffer for the logits of one chunk, at its largest size
    logits_row: int  # the part of this buffer for one completion token
    head_gradient: int  # the new gradient of the LM head, before it is added to `.grad`
    head_sum: int  # fp32 sum of the LM head's gradients over several chunks
    # Maximum number of completion tokens that are computed in one chunk, so that no fp32 sum over
    # chunks is needed.
    one_chunk_rows: int
    kept_per_token: float  # per trunk token: activations of all layers for the backward pass
    working_per_token: float  # per trunk token: temporary memory of one layer's backward pass
    working: int  # one tile of the MLP, independent of the number of tokens

    @property
    def per_token(self) -> float:
        """Return the number of bytes per trunk token at the peak of the backward pass."""
        return self.kept_per_token + self.working_per_token

    @property
    def head(self) -> int:
        """Return the maximum temporary memory of the LM head in bytes."""
        return self.logits + self.head_gradient + self.head_sum

    def peak(self, tokens: int, rows: int | None = None) -> int:
        """Return the number of bytes at the peak of a micro-batch.

        Args:
            tokens: number of trunk tokens.
            rows: number of completion tokens. None assumes that they fill the LM head's buffer for
                logits.
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
        """Return the maximum number of trunk tokens for a memory limit in bytes."""
        room = limit - self.fixed
        with_head = (room - self.head) / self.kept_per_token if self.kept_per_token else math.inf
        return max(0, int(min(with_head, (room - self.working) / self.per_token)))


def predict(
    shape: Shape,
    model: ModelConfig,
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
        device: "cpu" or "cuda". On the CPU, offloading of layer inputs saves no memory.
        reference: True if a copy of the weights is stored for the KL term.
        critic: True if a separate critic of the policy's shape is trained, too.
        gpu: memory of the GPU in bytes. None uses the memory of this machine's GPU.
    """
    # 1. Add up the weights, their gradients, Adam's two moments and a reference. Autocast stores a
    # 16-bit copy of the weights.
    weight = DTYPE_BYTES[model.dtype]
    activation = DTYPE_BYTES[model.autocast or model.dtype]
    stored = weight + (activation if model.autocast else 0)
    trained = trainable_parameters(shape, model)
    fixed = shape.parameters * stored + 3 * trained * weight
    if critic:
        fixed *= 2
    if reference and model.lora is None:
        fixed += shape.parameters * weight
    # 2. Compute the memory of the LM head. The bf16 kernels of a GPU store exponentials in 16 bits
    # instead of logits in fp32. If all rows fit into one chunk, they need no fp32 sum over chunks.
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
    """Return this machine's memory in bytes, or its container's memory limit if that is lower."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text(encoding="ascii").strip() if limit.is_file() else ""
    return min(total, int(text)) if text.isdigit() else total


def trainable_parameters(shape: Shape, model: ModelConfig) -> int:
    """Return the number of trained parameters. A LoRA adapter covers all linear layers."""
    if model.lora is None:
        return shape.parameters
    h, i, q, kv = shape.hidden, shape.mlp, shape.query, shape.kv
    sides = (h + q) + 2 * (h + kv) + (q + h) + 3 * (h + i)
    return shape.layers * model.lora.r * sides


def _per_token(shape: Shape, model: ModelConfig, e: int, on_cpu: bool) -> tuple[float, float, int]:
    """Compute the memory of activations.

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
    # A CPU computes attention in fp32. It stores fp32 copies, and the output also in 16 bits.
    if on_cpu and e == 2:
        attention = 4 * (2 * shape.query + 2 * shape.kv) + e * shape.query
    mlp, backward, tile = 4 * e * i, e * (2 * i + 3 * h), 0
    # The input tiles are views of the norm's output, so they need no memory. The backward pass
    # recomputes one tile at a time.
    if model.tiled_mlp is not None:
        mlp, backward, tile = 0, 18 * h if e == 2 else 4 * e * h, model.tiled_mlp * 6 * e * i
    layer = norms + attention + mlp
    if not model.gradient_checkpointing:
        return layers * layer, backward, tile
    stored = 0 if model.gradient_checkpointing == "offload" and not on_cpu else layers * e * h
    return stored, backward + layer, tile


def predict_run(shape: Shape, config: RunConfig, device: str, gpu: int | None = None) -> Memory:
    """Predict the memory of a run. A separate critic is assumed to have the sizes of the policy.

    Args:
        shape: sizes of the policy.
        config: configuration of the run.
        device: "cpu" or "cuda".
        gpu: memory of the GPU in bytes. None uses the memory of this machine's GPU.
    """
    return predict(
        shape, config.model, device=device, gpu=gpu,
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
    # If `lora` is not set, the adapter comes from the model's path. Predict with its rank.
    if ranks and config.model.lora is None:
        model = config.model.model_copy(update={"lora": LoraConfig(r=max(ranks))})
        config = config.model_copy(update={"model": model})
    return predict_run(shape, config, lm.device.type)
