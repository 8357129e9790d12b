"""Parameters of a head that FSDP2 shards (DTensors): gathered for a call, their gradient reduced.

Inside the forward of the FSDP2 module that holds them parameters are whole and plain, and nothing
here is done. Read elsewhere they are shards: `DTensor.full_tensor()` alone would hand each rank's
gradient to its own shard, unreduced.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

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
            "holds it, or pass a whole tensor and reduce its gradient yourself"
        )
    return _Gathered.apply(x)


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
