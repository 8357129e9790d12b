"""Options that save memory and change no result: checkpointing, tiled MLPs, frozen weights.

`planning/memory_model.py` has the bytes that each of them saves.
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

# Dropout is off everywhere in the trainer: the second forward pass needs no random state.
RECOMPUTE: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}


def apply_options(model: Any, config: ModelConfig) -> None:
    if config.gradient_checkpointing:
        enable_checkpointing(model, config.checkpoint_offload)
    if config.tiled_mlp is not None:
        tile_mlps(model, config.tiled_mlp)
    if config.frozen:
        freeze(model, config.frozen)


def enable_checkpointing(model: Any, offload: bool = False) -> None:
    """Recompute every layer in the backward pass; `offload`: its input waits on the host, pinned
    where there is a GPU (transformers' own offload asks for pinned memory everywhere).
    """
    newer = getattr(model, "activation_checkpointing_enable", None)  # its name since 5.23
    (newer or model.gradient_checkpointing_enable)(RECOMPUTE)
    if not offload:
        return
    for module in model.modules():
        recompute = getattr(module, "_gradient_checkpointing_func", None)
        if recompute is not None:
            module._gradient_checkpointing_func = functools.partial(_offloaded, recompute)


def _offloaded(recompute: Callable, *args: Any, **kwargs: Any) -> Any:
    with torch.autograd.graph.save_on_cpu(pin_memory=torch.cuda.is_available()):
        return recompute(*args, **kwargs)


def tile_mlps(model: nn.Module, rows: int) -> None:
    """Let every dense MLP see at most `rows` rows at a time, recomputed in the backward pass.

    Raises ValueError without a module named `mlp` or `feed_forward` that consists of linear layers.
    """
    named = (m for n, m in model.named_modules() if n.split(".")[-1] in ("mlp", "feed_forward"))
    mlps = [module for module in named if _is_dense(module)]
    if not mlps:
        kind = type(model).__name__
        raise ValueError(f"model.tiled_mlp: {kind} has no dense MLP that could be tiled")
    for module in mlps:
        # A bound method survives a deepcopy with the module's copy as its owner (the reference).
        tiled: Any = types.MethodType(functools.partial(_tiled, rows), module)
        module.forward = tiled


def _is_dense(module: nn.Module) -> bool:
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
    """Switch off the gradients of parameters whose names match a pattern (`*`, `?` as in a shell).

    Raises ValueError for a pattern that matches none, and when nothing is left to train.
    """
    for pattern in patterns:
        matches = [p for n, p in model.named_parameters() if fnmatch.fnmatchcase(n, pattern)]
        if not matches:
            raise ValueError(f"model.frozen: no parameter matches {pattern!r}")
        for parameter in matches:
            parameter.requires_grad_(False)
    if not any(p.requires_grad for p in model.parameters()):
        raise ValueError(f"model.frozen: {list(patterns)} leave no parameter to train")
