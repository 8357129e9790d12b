"""Ranks: parameters in shards (DTensors), and what ranks that share a head agree on in a call.

FSDP2's ranks have rows of hidden of their own: a parameter is gathered for a call, its gradient
reduced. Tensor-parallel ranks have the same rows, and each works with its rows of the vocabulary;
that is so only where a caller says it with `group=`.

A call with `group=` makes two small all-gathers before it works: the size of every shard, and what
is about to be computed. A rank that refuses an argument says so in place of that, so that every
rank raises the same ValueError and none waits for another.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, distributed

from grpo_fast.errors import argument_error, require
from grpo_fast.kernels.gpu.capture import refuse
from grpo_fast.kernels.head.vocabulary import VocabularyShard
from grpo_fast.kernels.route import head_route
from grpo_fast.kernels.workspace import workspace_bytes

TENSOR_PARALLEL = ("tp", "tensor", "tensor_parallel")  # the names of such a mesh dimension
TEXT_BYTES = 1024  # of a message, in a tensor
OK = b"+"
ERROR = b"-"


def is_sharded(x: object) -> bool:
    # torch.distributed.tensor is slow to import, and only who has a DTensor has paid for it.
    return hasattr(type(x), "full_tensor")


def gather_parameter(name: str, x: Any) -> Any:
    """The whole of a parameter in shards (or copies) over one mesh dimension; a call of all ranks.

    Its gradient is averaged over the ranks into the shards. Anything but a DTensor is returned as
    it is; one over other meshes is refused.
    """
    if not is_sharded(x):
        return x
    from torch.distributed.tensor import Replicate, Shard

    names = x.device_mesh.mesh_dim_names or ()
    known = len(x.placements) == 1 and isinstance(x.placements[0], (Shard, Replicate))
    fits = known and not any(dimension in TENSOR_PARALLEL for dimension in names)
    if not fits:
        # Built only here: text about placements breaks a torch.compile graph on torch 2.14.
        expected = (
            "a plain tensor, or a DTensor sharded over one data-parallel mesh dimension (FSDP2)"
        )
        came = f"{x.placements} over mesh dimensions {names or x.device_mesh.ndim}"
        advice = (
            "call inside the forward of the FSDP2 module that holds it, pass "
            "group=weight.device_mesh where the ranks share the rows of hidden and each holds rows "
            "of the vocabulary, or pass a full tensor and reduce its gradient yourself"
        )
        raise argument_error(name, expected, f"{came}; {advice}")
    return _gather(x)


def process_group(group: Any) -> distributed.ProcessGroup:
    """The group of a call, or of the mesh of one dimension that names it; ValueError for others."""
    expected = "a process group or a mesh of one dimension"
    if hasattr(group, "mesh_dim_names"):  # a DeviceMesh, whose module is slow to import
        came = f"a mesh of {group.ndim} dimensions; mesh['name'] is one of them"
        require(group.ndim == 1, "group", expected, came)
        group = group.get_group()
    came = str(group if isinstance(group, int | str) else type(group).__name__)
    if not isinstance(group, distributed.ProcessGroup):
        raise argument_error("group", f"{expected} that this process is in", came)
    return group


def local_rows(name: str, x: Any, group: distributed.ProcessGroup | None) -> Any:
    """A parameter's rows on this rank of the group; without a group the whole of it (`gather_parameter`).

    Raises ValueError for a DTensor that is not sharded by rows over the ranks of the group.
    """
    if group is None or not is_sharded(x):
        return gather_parameter(name, x)
    from torch.distributed.tensor import Shard

    ranks = distributed.get_process_group_ranks
    mesh = x.device_mesh
    by_rows = tuple(x.placements) == (Shard(0),)
    fits = by_rows and mesh.ndim == 1 and ranks(mesh.get_group()) == ranks(group)
    expected = f"a DTensor with placements {(Shard(0),)} over the ranks {ranks(group)} of group"
    came = f"{x.placements} over the ranks {mesh.mesh.tolist()}"
    require(fits, name, f"the rows of this rank, or {expected}", came)
    return x.to_local()


class _Gather(torch.autograd.Function):
    """All-gather forward; mean over the ranks, scattered, backward."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Tensor:
        ctx.mesh = x.device_mesh
        ctx.placements = x.placements
        whole: Tensor = x.full_tensor()
        return whole

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        from torch.distributed.tensor import DTensor, Partial

        parts = DTensor.from_local(gradient, ctx.mesh, [Partial()], run_check=False)
        reduced = parts.redistribute(placements=ctx.placements)
        return reduced / ctx.mesh.size()  # gloo has no mean


_gather: Callable[[Any], Tensor] = _Gather.apply


class Agreement:
    """A block in which a call's arguments are checked, on every rank of a group (None: alone)."""

    def __init__(self, group: object) -> None:
        self.group = None if group is None else process_group(group)
        self.is_open = self.group is not None  # the other ranks wait for a word of this one

    def __enter__(self) -> Agreement:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self.is_open and isinstance(error, Exception):
            self._exchange(ERROR, str(error) or type(error).__name__)

    def shard(self, weight: Tensor) -> VocabularyShard | None:
        """The shard of this weight's rows; None without a group.

        Raises ValueError where nobody holds a row, or a rank has refused an argument.
        """
        if self.group is None:
            return None
        refuse("group", weight, "a group")
        sizes = tuple(map(int, self._exchange(OK, str(weight.shape[0]))))
        expected = "at least one vocabulary row on the ranks of group"
        came = f"{len(sizes)} empty shards"
        require(any(sizes), "lm_head_weight", expected, came)
        return VocabularyShard(self.group, sizes, distributed.get_rank(self.group))

    def check_agreement(
        self,
        tensors: Sequence[Tensor | None],  # (hidden, weight, bias)
        target_ids: Tensor,  # (T,) of the active rows
        wanted: list[bool],
        backend: str,
        numbers: str,
    ) -> None:
        """Raise a ValueError where a rank has refused an argument, or makes another call."""
        if self.group is None:
            return
        hidden, weight, bias = tensors
        assert hidden is not None and weight is not None
        head_route(backend, weight, is_shard=True)  # which may not run here
        facts = {
            "hidden": f"{tuple(hidden.shape)} in {hidden.dtype}",
            "bias": "None" if bias is None else "a tensor",
            "target_ids": f"{len(target_ids)} active ones with checksum {checksum(target_ids)}",
            "requires_grad": f"{wanted} of hidden, weight and bias",
            "config": f"numbers with checksum {zlib.crc32(numbers.encode())}",
            "GRPO_FAST_WORKSPACE_MIB": f"{workspace_bytes(weight.device) >> 20}",
        }
        answers = [text.split("\n") for text in self._exchange(OK, "\n".join(facts.values()))]
        self.is_open = False
        for rank, others in enumerate(answers):
            for name, first, other in zip(facts, answers[0], others, strict=True):
                came = f"{first} on rank 0 and {other} on rank {rank}"
                require(first == other, name, "the same on every rank of group", came)

    def _exchange(self, verdict: bytes, text: str) -> list[str]:
        """Gather one line of each rank, in their order. Where one refuses, all raise its error."""
        assert self.group is not None
        self.is_open = False  # where this fails nobody waits any more
        ranks = distributed.get_world_size(self.group)
        is_cuda = distributed.get_backend(self.group) == "nccl"
        device = torch.device("cuda", torch.cuda.current_device()) if is_cuda else "cpu"
        line = (verdict + text.encode())[:TEXT_BYTES].ljust(TEXT_BYTES, b"\0")
        mine = torch.tensor(list(line), dtype=torch.uint8, device=device)
        everyone = [torch.empty_like(mine) for _ in range(ranks)]
        distributed.all_gather(everyone, mine, group=self.group)
        lines = [bytes(x.tolist()).rstrip(b"\0") for x in everyone]
        texts = [x[1:].decode(errors="ignore") for x in lines]  # the cut may split a character
        refusals = {rank: texts[rank] for rank, x in enumerate(lines) if x[:1] == ERROR}
        if not refusals:
            self.is_open = True
            return texts
        rank, message = next(iter(refusals.items()))
        is_common = len(refusals) == ranks and len(set(texts)) == 1
        raise ValueError(message if is_common else f"{message} (on rank {rank} of group)")


NO_GROUP = Agreement(None)


def checksum(x: Tensor) -> int:
    """A number that tells other ids, or another order of them, apart; wraps around."""
    return int((x * torch.arange(1, len(x) + 1, device=x.device)).sum())
