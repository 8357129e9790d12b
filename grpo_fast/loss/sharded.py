"""Parameters of a head that lie in shards (DTensors): what they are to a call.

A DTensor alone does not say what its ranks have in common. Those of FSDP2 have rows of hidden of
their own, so its parameters are gathered for a call, and their gradient reduced. Tensor-parallel
ranks have the same rows, and each works with its rows of the vocabulary; that is taken to be so
only where a caller says it with `group=`.

Inside the forward of the FSDP2 module that holds them parameters are whole and plain, and nothing
here is done. Read elsewhere they are shards: `DTensor.full_tensor()` alone would hand each rank's
gradient to its own shard, unreduced.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, distributed

TENSOR_PARALLEL = ("tp", "tensor", "tensor_parallel")  # the names of such a mesh dimension


def is_sharded(x: object) -> bool:
    # torch.distributed.tensor is slow to import, and only who has a DTensor has paid for it.
    return hasattr(type(x), "full_tensor")


def gathered(name: str, x: Any) -> Any:
    """The whole of a parameter that lies in shards (or copies) over one mesh dimension.

    As with FSDP, each rank has rows of its own, and its gradient is averaged over the ranks into
    the shards. All ranks call together. Anything but a DTensor is returned as it is.

    Raises ValueError for a DTensor over several mesh dimensions, with partial sums, or over
    tensor-parallel ranks.
    """
    if not is_sharded(x):
        return x
    from torch.distributed.tensor import Replicate, Shard

    names = x.device_mesh.mesh_dim_names or ()
    known = len(x.placements) == 1 and isinstance(x.placements[0], (Shard, Replicate))
    if not known or any(dimension in TENSOR_PARALLEL for dimension in names):
        raise ValueError(
            f"{name}: expected a plain tensor, or a DTensor sharded over one data-parallel mesh "
            f"dimension (FSDP2), got {x.placements} over mesh dimensions "
            f"{names or x.device_mesh.ndim}; call inside the forward of the FSDP2 module that "
            "holds it, pass group=weight.device_mesh where the ranks share the rows of hidden and "
            "each holds rows of the vocabulary, or pass a whole tensor and reduce its gradient "
            "yourself"
        )
    return _Gathered.apply(x)


def process_group(group: Any) -> distributed.ProcessGroup:
    """The group of a call that names one, or the mesh of one dimension that stands for it.

    Raises ValueError for anything else, and where this process is not in the group.
    """
    if hasattr(group, "mesh_dim_names"):  # a DeviceMesh, whose module is slow to import
        if group.ndim != 1:
            raise ValueError(
                "group: expected a process group or a mesh of one dimension, got a mesh of "
                f"{group.ndim} dimensions; mesh['name'] is one of them"
            )
        group = group.get_group()
    if not isinstance(group, distributed.ProcessGroup):
        raise ValueError(
            "group: expected a process group or a mesh of one dimension that this process is in, "
            f"got {group if isinstance(group, int | str) else type(group).__name__}"
        )
    return group


def own_rows(name: str, x: Any, group: distributed.ProcessGroup | None) -> Any:
    """A parameter as a call with this group takes it: its rows on this rank, or without a group the
    whole of it (`gathered`).

    Raises ValueError for a DTensor that is not sharded by rows over the ranks of the group.
    """
    if group is None or not is_sharded(x):
        return gathered(name, x)
    from torch.distributed.tensor import Shard

    ranks = distributed.get_process_group_ranks
    mesh, by_rows = x.device_mesh, tuple(x.placements) == (Shard(0),)
    if not by_rows or mesh.ndim != 1 or ranks(mesh.get_group()) != ranks(group):
        raise ValueError(
            f"{name}: expected the rows of this rank, or a DTensor with placements "
            f"{(Shard(0),)} over the ranks {ranks(group)} of group, got {x.placements} over the "
            f"ranks {mesh.mesh.tolist()}"
        )
    return x.to_local()


class _Gathered(torch.autograd.Function):
    """All-gather forward; mean over the ranks, scattered, backward."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Tensor:
        ctx.mesh, ctx.placements = x.device_mesh, x.placements
        return x.full_tensor()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        from torch.distributed.tensor import DTensor, Partial

        parts = DTensor.from_local(gradient, ctx.mesh, [Partial()], run_check=False)
        reduced = parts.redistribute(placements=ctx.placements)
        return reduced / ctx.mesh.size()  # gloo has no mean
