"""Models whose weights lie in shards on all ranks (FSDP2).

Each decoder layer is gathered when its turn comes, forward and backward; embeddings, last norm and
head belong to the model itself, whose method `inside` has them together. Gradients are sums over
the ranks: losses are divided by the whole step's counts.
"""

from __future__ import annotations

import types
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from grpo_fast.train.ranks import distributed


def shard_all(models: Iterable[Any], device: torch.device, replicas: int | None) -> None:
    """Every model of a run, those that are None apart."""
    mesh = mesh_of(device, replicas)
    for model in models:
        if model is not None:
            model.shard(mesh)


def mesh_of(device: torch.device, replicas: int | None) -> Any:
    """All ranks in a row, or in `replicas` rows: a row holds the weights once."""
    from torch.distributed.device_mesh import init_device_mesh

    ranks = distributed.size()
    if replicas is None:
        return init_device_mesh(device.type, (ranks,), mesh_dim_names=("shard",))
    shape = (replicas, ranks // replicas)
    return init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))


def shard(model: Any, mesh: Any) -> None:
    """Leave each rank its part of the weights, and of the gradients."""
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
    from transformers.modeling_layers import GradientCheckpointingLayer

    # Hidden states are a view of a batch of one; nothing writes into them.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    for module in (*layers, model):
        sharded: Any = fully_shard(module, mesh=mesh)
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)  # gloo has no products with a factor
    model.inside = types.MethodType(_inside, model)
    register_fsdp_forward_method(model, "inside")
    with torch.no_grad():  # whose parts are whose is settled by the first pass: that of the whole
        model.inside(lambda: None)
    model.reshard()


def _inside(_: nn.Module, work: Callable[[], Any]) -> Any:
    return work()


@contextmanager
def unsharded(model: Any) -> Iterator[None]:
    """All weights on every rank, and no rank waits for another inside; then shards again."""
    parts = _parts(model)
    model.set_reshard_after_forward(False)
    for part in parts:
        part.unshard()
    try:
        yield
    finally:
        model.set_reshard_after_forward(True)  # first: a rollout that was left keeps them else
        for part in parts:
            part.reshard()
        model.set_reshard_after_forward(False, recurse=False)  # its head is wanted in backward


def _parts(model: nn.Module) -> list[Any]:
    from torch.distributed.fsdp import FSDPModule

    return [module for module in model.modules() if isinstance(module, FSDPModule)]
