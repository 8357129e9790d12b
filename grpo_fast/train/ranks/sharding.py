"""Models whose weights lie in shards on all ranks (FSDP2).

Each decoder layer is gathered when its turn comes; embeddings, last norm and head belong to the
model itself, whose method `inside` has them together.
"""

from __future__ import annotations

import types
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from grpo_fast.train.ranks import distributed


def shard_all(models: Iterable[Any], device: torch.device, replicas: int | None) -> None:
    """Shard the models that are not None, and give all ranks rank 0's random state."""
    from torch.distributed.device_mesh import init_device_mesh

    # In rows, each of which holds the weights once.
    rows = {"shard": distributed.size()}
    if replicas is not None:
        rows = {"replicate": replicas, "shard": distributed.size() // replicas}
    mesh = init_device_mesh(device.type, tuple(rows.values()), mesh_dim_names=tuple(rows))
    for model in models:
        if model is not None:
            model.shard(mesh)
    state = torch.get_rng_state()
    torch.distributed.broadcast(state, 0)
    torch.set_rng_state(state)


def shard(model: Any, mesh: Any, device: torch.device) -> None:
    """Leave each rank its part of rank 0's weights, on `device`, and of the gradients. Collective.

    A tensor at a time is sent. Models of the other ranks may be on the meta device till now.
    """
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
    from transformers.modeling_layers import GradientCheckpointingLayer

    # Hidden states are a view of a batch of one; nothing writes into them.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    is_empty = any(parameter.is_meta for parameter in model.parameters())
    _take_dtypes(model)
    # Before `fully_shard`, which makes shards of the parameters.
    whole = model.state_dict() if distributed.is_main() else {}
    layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    for module in (*layers, model):
        sharded: Any = fully_shard(module, mesh=mesh)
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)  # gloo has no products with a factor
    # By default FSDP2 gathers ahead, in backward, in the reverse order of all forward passes since
    # the last one: those of a rollout, too, whose number and kind differ from rank to rank, which
    # then wait for each other for ever. The model itself is whole: behind the first layer none.
    for module, following in zip((*layers, model), (model, *layers), strict=True):
        module.set_modules_to_backward_prefetch([following])
    if is_empty:
        model.to_empty(device=device)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, whole, options=options)
    del whole
    _take_buffers(model, device)
    model.inside = types.MethodType(lambda _, work: work(), model)
    register_fsdp_forward_method(model, "inside")
    # FSDP2 assigns parameters to groups in the first forward pass, so run one through the root.
    with torch.no_grad():
        model.inside(lambda: None)
    model.reshard()


def _take_dtypes(model: nn.Module) -> None:
    """Give an empty model's parameters the dtypes of rank 0's, which a file may have changed."""
    own = {name: [str(p.dtype), *p.shape] for name, p in model.named_parameters()}
    mains = distributed.gather(own)[0]
    with distributed.together():
        if {x: shape for x, (_, *shape) in own.items()} != {x: y for x, (_, *y) in mains.items()}:
            raise ValueError("model: expected the parameters of rank 0's model, built others")
    for name, parameter in model.named_parameters():
        dtype = getattr(torch, mains[name][0].removeprefix("torch."))
        if parameter.is_meta and parameter.dtype != dtype:
            parameter.data = parameter.data.to(dtype)


@torch.no_grad()
def _take_buffers(model: nn.Module, device: torch.device) -> None:
    """Copy rank 0's buffers, and tensors that modules keep as plain attributes, to all ranks.

    No file holds most of them (rotary frequencies, masks), and an empty model has garbage there.
    """
    owners: dict[str, tuple[Any, str]] = {}
    for path, module in model.named_modules():
        for owner in (module._buffers, vars(module)):
            known = (name for name, value in owner.items() if isinstance(value, torch.Tensor))
            owners |= {f"{path}.{name}": (owner, name) for name in known}
    own = [[key, str(o[name].dtype), *o[name].shape] for key, (o, name) in owners.items()]
    for key, dtype, *shape in distributed.gather(own)[0]:
        kind = getattr(torch, dtype.removeprefix("torch."))
        sent = torch.empty(shape, dtype=kind, device=device)
        owner, name = owners.get(key, ({}, key))  # a forward pass on rank 0 may have left more
        if distributed.is_main():
            sent.copy_(owner[name])
        # As bytes: gloo does not broadcast every dtype.
        torch.distributed.broadcast(sent.view(-1).view(torch.uint8), 0)
        owner[name] = sent


@contextmanager
def unsharded(model: Any) -> Iterator[None]:
    """All weights on every rank, and no rank waits for another inside; then shards again."""
    from torch.distributed.fsdp import FSDPModule

    parts: list[Any] = [part for part in model.modules() if isinstance(part, FSDPModule)]
    model.set_reshard_after_forward(False)
    for part in parts:
        part.unshard()
    try:
        yield
    finally:
        model.set_reshard_after_forward(True)
        for part in parts:
            part.reshard()
        model.set_reshard_after_forward(False, recurse=False)  # its head is wanted in backward
