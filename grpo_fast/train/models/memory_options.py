"""Options that save memory: gradient checkpointing, tiled MLPs and frozen weights.

`planning/memory_model.py` predicts how much each option saves.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from typing import Any

from torch import nn

from grpo_fast.attention import memory, offload_checkpoints
from grpo_fast.train.config import ModelConfig
from grpo_fast.train.config.base import named_in

# Do not save the state of the random generator, because dropout is off everywhere in the trainer.
RECOMPUTE: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}


def apply_options(model: Any, config: ModelConfig) -> None:
    """Apply the options of the section `model` to a model."""
    if config.gradient_checkpointing:
        enable_checkpointing(model, config.checkpoint_offload)
    if config.tiled_mlp is not None:
        tile_mlps(model, config.tiled_mlp)
    if config.frozen:
        freeze(model, config.frozen)


def enable_checkpointing(model: Any, offload: bool = False) -> None:
    """Recompute every layer in the backward pass instead of storing its activations.

    Args:
        model: a model of transformers.
        offload: store the inputs of the layers in host memory. The corresponding option of
            transformers is not used, because it requires pinned memory and therefore a GPU.
    """
    newer = getattr(model, "activation_checkpointing_enable", None)  # since transformers 5.23
    (newer or model.gradient_checkpointing_enable)(RECOMPUTE)
    if offload:
        offload_checkpoints(model)


def tile_mlps(model: nn.Module, rows: int) -> None:
    """Make every dense MLP compute at most `rows` rows at a time. Errors name `model.tiled_mlp`."""
    with named_in("model"):
        memory.tile_mlps(model, rows)


def freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    """Exclude parameters from training.

    Args:
        model: the model.
        patterns: patterns of parameter names, with the shell wildcards `*` and `?`.

    Raises:
        ValueError: a pattern matches no parameter, or no trainable parameter remains.
    """
    for pattern in patterns:
        matches = [p for n, p in model.named_parameters() if fnmatch.fnmatchcase(n, pattern)]
        if not matches:
            raise ValueError(f"model.frozen: no parameter matches {pattern!r}")
        for parameter in matches:
            parameter.requires_grad_(False)
    if not any(p.requires_grad for p in model.parameters()):
        raise ValueError(f"model.frozen: {list(patterns)} leave no parameter to train")
