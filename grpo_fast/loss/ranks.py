"""Sharded parameters (DTensors), and the check that tensor-parallel ranks make the same call.

With FSDP2, each rank has different rows of `hidden`. The weight of the LM head is gathered for the
call, and its gradient is reduced. With tensor parallelism (`group=`), all ranks have the same rows
of `hidden`, and each rank computes with its part of the vocabulary.

A call with `group=` starts with two small all-gathers: one of the shard sizes, and one of a
description of the call. A rank with invalid arguments sends its error message instead, so that
every rank raises the same ValueError and no rank deadlocks in a later collective.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, distributed

from grpo_fast.errors import argument_error, require
from grpo_fast.kernels.gpu.launch import refuse
from grpo_fast.kernels.head.shards import VocabularyShard, gathered
from grpo_fast.kernels.route import head_route
from grpo_fast.kernels.types import Context, is_sharded
from grpo_fast.kernels.workspace import workspace_bytes

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

    from grpo_fast.loss.call import Call

Parameter = TypeVar("Parameter", Tensor, Tensor | None)
# Names of device-mesh dimensions that indicate tensor parallelism.
TENSOR_PARALLEL = ("tp", "tensor", "tensor_parallel")
TEXT_BYTES = 1024  # length of the uint8 tensor that carries one message
OK = b"+"
ERROR = b"-"


def process_group(group: Any) -> distributed.ProcessGroup:
    """Return the process group of a `group=` argument, which is a group or a 1-D device mesh."""
    expected = "a process group or a mesh of one dimension"
    if hasattr(group, "mesh_dim_names"):  # a DeviceMesh; its module is slow to import
        came = f"a mesh of {group.ndim} dimensions; pass one of them, mesh['name']"
        require(group.ndim == 1, "group", expected, came)
        group = group.get_group()
    came = str(group if isinstance(group, int | str) else type(group).__name__)
    if not isinstance(group, distributed.ProcessGroup):
        raise argument_error("group", f"{expected} that this process is in", came)
    return group


def local_rows(name: str, x: Parameter, group: distributed.ProcessGroup | None) -> Parameter:
    """Return the rows of a parameter that this rank uses.

    A tensor that is not a DTensor is returned unchanged. For a DTensor, the placements must be one
    of these two:

    - With a group, it must be sharded by rows over the ranks of the group. Its local rows are
      returned.
    - Without a group, it must be sharded or replicated over one data-parallel mesh dimension. The
      full tensor is returned, by a collective call. The backward pass averages the gradient over
      the ranks, and scatters it into the shards.

    Raises:
        ValueError: a DTensor has different placements.
    """
    if not is_sharded(x):
        return x
    from torch.distributed.tensor import Replicate, Shard

    mesh = x.device_mesh
    if group is None:
        names = mesh.mesh_dim_names or ()
        known = len(x.placements) == 1 and isinstance(x.placements[0], (Shard, Replicate))
        if known and not any(dimension in TENSOR_PARALLEL for dimension in names):
            return _gather(x)
        expected = (
            "a plain tensor, or a DTensor sharded over one data-parallel mesh dimension (FSDP2)"
        )
        came = f"{x.placements} over mesh dimensions {names or mesh.ndim}"
        advice = (
            "call inside the forward of the FSDP2 module that holds it, pass "
            "group=weight.device_mesh where the ranks share the rows of hidden and each holds rows "
            "of the vocabulary, or pass a full tensor and reduce its gradient yourself"
        )
        raise argument_error(name, expected, f"{came}; {advice}")
    ranks_of = distributed.get_process_group_ranks
    by_rows = tuple(x.placements) == (Shard(0),)
    fits = by_rows and mesh.ndim == 1 and ranks_of(mesh.get_group()) == ranks_of(group)
    expected = f"a DTensor with placements {(Shard(0),)} over the ranks {ranks_of(group)} of group"
    came = f"{x.placements} over the ranks {mesh.mesh.tolist()}"
    require(fits, name, f"the rows of this rank, or {expected}", came)
    return x.to_local()


class _Gather(torch.autograd.Function):
    """All-gather of a sharded parameter. The backward pass averages and scatters the gradient.

    If the full weight gets no gradient on a rank, autograd passes zeros to `backward`, so that this
    rank joins the collective, too. The backward pass of `DTensor.full_tensor` would raise an error.
    """

    @staticmethod
    def forward(ctx: Context, x: DTensor) -> Tensor:
        ctx.mesh = x.device_mesh
        ctx.placements = x.placements
        full: Tensor = x.full_tensor()
        return full

    @staticmethod
    def backward(ctx: Context, gradient: Tensor) -> Any:
        from torch.distributed.tensor import DTensor, Partial

        # Mark the gradient as a sum that is not reduced yet, with Partial(). redistribute() then
        # reduces and scatters it in one collective.
        parts = DTensor.from_local(gradient, ctx.mesh, [Partial()], run_check=False)
        reduced = parts.redistribute(placements=ctx.placements)
        return reduced / ctx.mesh.size()  # gloo cannot average, so sum and divide


_gather: Callable[[DTensor], Tensor] = _Gather.apply


class Agreement:
    """Context in which the ranks of a group check that they make the same call.

    If one rank raises inside the context, the other ranks raise the same error at their next
    exchange.

    Args:
        group: a process group, a one-dimensional device mesh, or None for a call without other
            ranks.
    """

    def __init__(self, group: object) -> None:
        self.group = None if group is None else process_group(group)
        self.is_open = self.group is not None  # True while other ranks wait for this rank's message

    def __enter__(self) -> Agreement:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self.is_open and isinstance(error, Exception):
            self._exchange(ERROR, str(error) or type(error).__name__)

    def shard(self, weight: Tensor) -> VocabularyShard | None:
        """Return this rank's part of the vocabulary, or None if the context has no group.

        The call is collective, because each rank sends the number of its rows to the other ranks.

        Raises:
            ValueError: all shards are empty, or another rank raised an error.
        """
        if self.group is None:
            return None
        refuse("group", weight, "a group")
        sizes = tuple(map(int, self._exchange(OK, str(weight.shape[0]))))
        expected = "at least one vocabulary row on the ranks of group"
        came = f"{len(sizes)} empty shards"
        # Check the sizes after the exchange, so that all ranks raise the error.
        require(any(sizes), "lm_head_weight", expected, came)
        return VocabularyShard(self.group, sizes, distributed.get_rank(self.group))

    def check_agreement(self, call: Call) -> None:
        """Check that all ranks make the same `Call`. This method is a collective call.

        The ranks compare a checksum of the text of all options that are not tensors.

        Raises:
            ValueError: a rank makes a different call, or has raised an error.
        """
        if self.group is None:
            return
        # 1. Describe this call as strings, which must be equal on all ranks.
        hidden, weight, bias = call.tensors
        head_route(call.backend, weight, is_shard=True)  # raises if the backend is not available
        target_ids = call.rows.target_ids
        term = call.divergence
        of_term = None if term is None else (*term[1:], getattr(term.teacher, "transform", None))
        text = repr((call.transform, call.return_entropy, call.config, of_term))
        facts = {
            "hidden": f"{tuple(hidden.shape)} in {hidden.dtype}",
            "bias": "None" if bias is None else "a tensor",
            "target_ids": f"{len(target_ids)} active ones with checksum {checksum(target_ids)}",
            "requires_grad": f"{list(call.wanted)} of hidden, weight and bias",
            "config": f"numbers with checksum {zlib.crc32(text.encode())}",
            "GRPO_FAST_WORKSPACE_MIB": f"{workspace_bytes(weight.device) >> 20}",
        }
        # 2. Exchange the strings, and compare each rank with rank 0.
        answers = [text.split("\n") for text in self._exchange(OK, "\n".join(facts.values()))]
        self.is_open = False
        for rank, others in enumerate(answers):
            for name, first, other in zip(facts, answers[0], others, strict=True):
                came = f"{first} on rank 0 and {other} on rank {rank}"
                require(first == other, name, "the same on every rank of group", came)

    def _exchange(self, verdict: bytes, text: str) -> list[str]:
        """Send a message to all ranks, and return the messages of all ranks in rank order.

        `verdict` is OK or ERROR. If any rank sent ERROR, all ranks raise its message as an error.
        """
        assert self.group is not None
        self.is_open = False  # if the collective fails, no rank waits for another message
        # Move the message to the GPU for NCCL, which cannot send CPU tensors.
        is_cuda = distributed.get_backend(self.group) == "nccl"
        device = torch.device("cuda", torch.cuda.current_device()) if is_cuda else "cpu"
        # Messages have a fixed size, because all_gather needs equal shapes.
        line = (verdict + text.encode())[:TEXT_BYTES].ljust(TEXT_BYTES, b"\0")
        mine = torch.tensor(list(line), dtype=torch.uint8, device=device)
        lines = [bytes(x).rstrip(b"\0") for x in gathered(mine, self.group).tolist()]
        # Ignore decoding errors, because the end of a long message may be cut inside a character.
        texts = [x[1:].decode(errors="ignore") for x in lines]
        errors = {rank: texts[rank] for rank, x in enumerate(lines) if x[:1] == ERROR}
        if not errors:
            self.is_open = True
            return texts
        rank, message = next(iter(errors.items()))
        is_common = len(errors) == len(lines) and len(set(texts)) == 1
        raise ValueError(message if is_common else f"{message} (on rank {rank} of group)")


NO_GROUP = Agreement(None)


def checksum(x: Tensor) -> int:
    """Return a checksum of ids that depends on their order. The sum wraps around at 64 bits."""
    return int((x * torch.arange(1, len(x) + 1, device=x.device)).sum())
