"""Sharding of model weights over the ranks with FSDP2.

FSDP2 gathers the weights of a decoder layer when the layer is computed. The embedding, the final
norm and the LM head belong to the root module, whose weights are gathered inside
`model.inside(work)`.
"""

from __future__ import annotations

import types
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from grpo_fast.errors import require
from grpo_fast.train.ranks import distributed

if TYPE_CHECKING:
    from peft import PeftModel
    from torch.distributed.device_mesh import DeviceMesh
    from transformers import PreTrainedModel


def shard_all(
    models: Iterable[PreTrainedModel], device: torch.device, replicas: int | None
) -> None:
    """Shard models, and give all ranks the random state of rank 0. All ranks must call this.

    Args:
        models: the models. None entries are skipped.
        device: device of the shards.
        replicas: number of ranks that store the same shard. None means 1.
    """
    from torch.distributed.device_mesh import init_device_mesh

    axes = {"shard": distributed.size()}
    if replicas is not None:
        axes = {"replicate": replicas, "shard": distributed.size() // replicas}
    mesh = init_device_mesh(device.type, tuple(axes.values()), mesh_dim_names=tuple(axes))
    for model in models:
        if model is not None:
            model.shard(mesh)
    torch.set_rng_state(distributed.from_main(torch.get_rng_state))


def shard(model: PreTrainedModel | PeftModel, mesh: DeviceMesh, device: torch.device) -> None:
    """Give each rank its shard of rank 0's weights. All ranks must call this.

    Rank 0 sends one tensor at a time, so that no rank receives the full model at once.

    Args:
        model: the model. On ranks other than 0 it may be on the meta device.
        mesh: device mesh of the ranks.
        device: device of the shards.
    """
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
    from transformers.modeling_layers import GradientCheckpointingLayer

    # FSDP2 warns that its output is a view, because in-place writes to views are wrong. The hidden
    # states are a view, but the trainer never writes to them in place.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    is_empty = any(parameter.is_meta for parameter in model.parameters())
    _take_dtypes(model)
    # Read the weights before `fully_shard` replaces the parameters with their shards.
    full = model.state_dict() if distributed.is_main() else {}
    layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    for module in (*layers, model):
        sharded: Any = fully_shard(module, mesh=mesh)
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)  # gloo cannot multiply by a factor
    # By default, FSDP2 prefetches layers in the reverse order of all forward passes since the last
    # backward pass. The number of forward passes in a rollout differs between ranks, so this order
    # would deadlock. Set the order of the layers instead.
    for module, following in zip((*layers, model), (model, *layers), strict=True):
        module.set_modules_to_backward_prefetch([following])
    if is_empty:
        model.to_empty(device=device)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, full, options=options)
    del full
    _take_buffers(model, device)
    model.inside = types.MethodType(lambda _, work: work(), model)
    register_fsdp_forward_method(model, "inside")
    # FSDP2 assigns parameters to groups in the first forward pass of the root module, so run an
    # empty pass here.
    with torch.no_grad():
        model.inside(lambda: None)
    model.reshard()


def _take_dtypes(model: nn.Module) -> None:
    """Cast the parameters of a model on the meta device to the dtypes of rank 0's parameters.

    The dtypes are stored in the model's files, which only rank 0 has read.

    Raises:
        ValueError: the names or shapes of a rank's parameters differ from those of rank 0.
    """
    parameters = dict(model.named_parameters())
    shapes = {name: parameter.shape for name, parameter in parameters.items()}
    dtypes = {name: parameter.dtype for name, parameter in parameters.items()}
    mains, dtypes = distributed.from_main(lambda: (shapes, dtypes))
    with distributed.together():  # otherwise broadcasts of different sizes would fail or hang
        expected = "the parameters of rank 0's model"
        require(shapes == mains, "model", expected, "others")
    for name, parameter in parameters.items():
        if parameter.is_meta:
            parameter.data = parameter.data.to(dtypes[name])


@torch.no_grad()
def _take_buffers(model: nn.Module, device: torch.device) -> None:
    """Copy rank 0's buffers, and the tensors in plain attributes of its modules, to all ranks.

    Most of these tensors, such as rotary frequencies and masks, are not stored in the model's
    files. In a model that was created on the meta device they are uninitialized.
    """
    owners: dict[str, tuple[dict[str, Any], str]] = {}
    for path, module in model.named_modules():
        for owner in (module._buffers, vars(module)):
            known = [name for name, value in owner.items() if isinstance(value, torch.Tensor)]
            owners |= {f"{path}.{name}": (owner, name) for name in known}

    def tensors() -> dict[str, torch.Tensor]:
        return {key: owner[name].cpu() for key, (owner, name) in owners.items()}

    for key, tensor in distributed.from_main(tensors).items():
        if key in owners:  # skip buffers that a forward pass on rank 0 added
            owner, name = owners[key]
            owner[name] = tensor.to(device)


@contextmanager
def unsharded(model: PreTrainedModel | PeftModel) -> Iterator[None]:
    """Gather all weights on every rank, and shard them again at the end.

    All ranks must enter this context. Forward passes inside the context do not communicate with
    other ranks.
    """
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
        # Restore the root module's setting. Its weights stay gathered after the forward pass,
        # because the backward pass uses the head again.
        model.set_reshard_after_forward(False, recurse=False)
