"""Options that save memory: gradient checkpointing, tiled MLPs and frozen weights.

`planning/memory_model.py` predicts how much each option saves.
"""

from __future__ import annotations

import fnmatch
import functools
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from grpo_fast.train.config import ModelConfig

# Dropout is off in the trainer, so the recomputation needs no state of the random generator.
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
    """Recompute every layer in the backward pass.

    Args:
        model: a model of transformers.
        offload: keep the inputs of the layers in host memory. transformers has this option, too,
            but requires pinned memory, which needs a GPU.
    """
    newer = getattr(model, "activation_checkpointing_enable", None)  # since transformers 5.23
    (newer or model.gradient_checkpointing_enable)(RECOMPUTE)
    if not offload:
        return
    # Wrap the checkpoint function that transformers has set on every layer.
    for module in model.modules():
        recompute = getattr(module, "_gradient_checkpointing_func", None)
        if recompute is not None:
            module._gradient_checkpointing_func = functools.partial(_offloaded, recompute)


def _offloaded(recompute: Callable, *args: Any, **kwargs: Any) -> Any:
    with torch.autograd.graph.save_on_cpu(pin_memory=torch.cuda.is_available()):
        return recompute(*args, **kwargs)


def tile_mlps(model: nn.Module, rows: int) -> None:
    """Let every dense MLP compute a limited number of rows at a time.

    Each tile is computed again in the backward pass.

    Args:
        model: a model of transformers.
        rows: rows of a tile.

    Raises:
        ValueError: the model has no dense MLP named `mlp` or `feed_forward`.
    """
    named = (m for n, m in model.named_modules() if n.split(".")[-1] in ("mlp", "feed_forward"))
    mlps = [module for module in named if _is_dense(module)]
    if not mlps:
        kind = type(model).__name__
        raise ValueError(f"model.tiled_mlp: {kind} has no dense MLP that could be tiled")
    for module in mlps:
        # The reference is a deep copy. Copying a bound method binds the copied module.
        tiled: Any = types.MethodType(functools.partial(_tiled, rows), module)
        module.forward = tiled


def _is_dense(module: nn.Module) -> bool:
    """Return True if all weights of an MLP belong to its linear layers."""
    others = [child for child in module.children() if not isinstance(child, nn.Linear)]
    linear = sum(isinstance(child, nn.Linear) for child in module.children())
    return linear >= 2 and not any(list(child.parameters()) for child in others)


def _tiled(rows: int, module: nn.Module, x: Tensor) -> Tensor:  # (…, T, h) → (…, T, h)
    plain = functools.partial(type(module).forward, module)
    if x.shape[-2] <= rows:
        return plain(x)
    tiles = x.split(rows, dim=-2)
    return torch.cat([checkpoint(plain, tile, **RECOMPUTE) for tile in tiles], dim=-2)


def freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    """Exclude parameters from training.

    Args:
        model: the model.
        patterns: name patterns with `*` and `?` as in a shell.

    Raises:
        ValueError: a pattern matches no parameter, or no parameter is left to train.
    """
    for pattern in patterns:
        matches = [p for n, p in model.named_parameters() if fnmatch.fnmatchcase(n, pattern)]
        if not matches:
            raise ValueError(f"model.frozen: no parameter matches {pattern!r}")
        for parameter in matches:
            parameter.requires_grad_(False)
    if not any(p.requires_grad for p in model.parameters()):
        raise ValueError(f"model.frozen: {list(patterns)} leave no parameter to train")
