"""Options that save activation memory: offloaded checkpoints and tiled MLPs.

They do not change results. They are options of the trainer's configuration, and arguments of
`FastGRPOTrainer`.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def offload_checkpoints(model: PreTrainedModel) -> None:
    """Store the inputs of checkpointed layers in host memory until the backward pass.

    transformers has a similar option, but it requires pinned memory and therefore a GPU. Calling
    this function again has no effect.

    Args:
        model: A transformers model whose gradient checkpointing is enabled.
    """
    for module in model.modules():
        recompute = getattr(module, "_gradient_checkpointing_func", None)
        if recompute is not None and getattr(recompute, "func", None) is not _offloaded:
            module._gradient_checkpointing_func = functools.partial(_offloaded, recompute)


def _offloaded(recompute: Callable[..., object], *args: object, **kwargs: object) -> object:
    with torch.autograd.graph.save_on_cpu(pin_memory=torch.cuda.is_available()):
        return recompute(*args, **kwargs)


def tile_mlps(model: nn.Module, rows: int) -> None:
    """Make every dense MLP compute at most `rows` token rows at a time, to save memory.

    Such a group of rows is a tile. Each tile is computed again in the backward pass.

    Args:
        model: A transformers model.
        rows: Largest number of token rows in a tile.

    Raises:
        ValueError: The model has no dense MLP named `mlp` or `feed_forward`.
    """
    named = (m for n, m in model.named_modules() if n.split(".")[-1] in ("mlp", "feed_forward"))
    mlps = [module for module in named if _is_dense(module)]
    if not mlps:
        kind = type(model).__name__
        raise ValueError(f"tiled_mlp: {kind} has no dense MLP that could be tiled")
    for module in mlps:
        # Bind the method to the module with MethodType. When the trainer copies the model to make
        # the reference model, a bound method is bound to the copied module. A closure would still
        # use the original module.
        module.forward = types.MethodType(functools.partial(_tiled, rows), module)


def _is_dense(module: nn.Module) -> bool:
    """Return whether an MLP has at least two linear layers and no weights in other layers."""
    others = [child for child in module.children() if not isinstance(child, nn.Linear)]
    linear = sum(isinstance(child, nn.Linear) for child in module.children())
    return linear >= 2 and not any(list(child.parameters()) for child in others)


def _tiled(rows: int, module: nn.Module, x: Tensor) -> Tensor:  # (…, T, h) → (…, T, h)
    plain = functools.partial(type(module).forward, module)
    if x.shape[-2] <= rows:
        return plain(x)
    tiles = x.split(rows, dim=-2)
    # Keep the default preserve_rng_state=True. An MLP may have dropout in TRL, and the second
    # computation of a tile must repeat it.
    return torch.cat([checkpoint(plain, tile, use_reentrant=False) for tile in tiles], dim=-2)
