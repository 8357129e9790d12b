"""The processes (ranks) of a run: their number, collectives, and errors that all ranks raise.

If torch has no default process group, every function treats this process as the only rank. torch
pickles the objects that ranks exchange. This is safe, because one launcher started all ranks.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from grpo_fast.errors import (
    EngineError,
    NonFiniteGradient,
    NonFiniteLogits,
    RankError,
    RewardError,
    Stopped,
    WriteError,
    require,
)

Result = TypeVar("Result")

LAUNCH = "torchrun --nproc-per-node 2 -m grpo_fast train …"
# If a rank raises an error of one of these classes, all ranks raise the same class. Errors of other
# classes become a RankError on the other ranks.
SHARED: tuple[type[Exception], ...] = (
    ValueError, MemoryError, torch.OutOfMemoryError, NonFiniteGradient, NonFiniteLogits,
    EngineError, RewardError, WriteError,
)  # fmt: skip


# ----------------------------------------------------------------------------- Number of ranks
def size() -> int:
    """Return the number of ranks. It is 1 if there is no process group."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """Return the number of this rank, counted from 0."""
    return dist.get_rank() if size() > 1 else 0


def launched_rank() -> int:
    """Return the rank that the launcher assigned, which is known even without a process group."""
    return int(os.environ.get("RANK", "0"))


def is_main() -> bool:
    """Return True on rank 0."""
    return rank() == 0


def is_of_collective(error: BaseException) -> bool:
    """Return True if a collective call raised the error, for example because a rank has ended."""
    return isinstance(error, (dist.DistError, RankError)) or "gloo/" in str(error)


@contextmanager
def as_rank_error() -> Iterator[None]:
    """Replace an error of a collective call with a RankError that explains the likely cause."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, RankError) or not is_of_collective(error):
            raise
        said = "a rank, which torchrun names, has ended or not answered in distributed_timeout"
        raise RankError(f"{said} seconds: {str(error).splitlines()[0][:200]}") from error


@contextmanager
def process_group(kind: str | None, replicas: int | None, timeout_s: float) -> Iterator[None]:
    """Create the process group of the ranks, and destroy it at the end.

    If torch already has a process group, it is used and not destroyed.

    Args:
        kind: value of the setting `distributed`.
        replicas: value of the setting `distributed_replicas`.
        timeout_s: seconds that a rank waits for the others.

    Raises:
        ValueError: `kind` is None although there are several ranks, or `kind` is set although no
            launcher started the process. Also raised if `replicas` does not divide the number of
            ranks.
    """
    count = int(os.environ.get("WORLD_SIZE", "1"))
    exists = dist.is_available() and dist.is_initialized()
    count = dist.get_world_size() if exists else count
    fits = kind is not None or count == 1
    expected = "ddp, fsdp2 or hsdp"
    require(fits, "distributed", f"{expected} for {count} processes", "none")
    fits = kind is None or exists or "RANK" in os.environ
    require(fits, "distributed", f"processes ({LAUNCH})", f"{kind} and only one")
    fits = count % (replicas or 1) == 0
    expected = f"a number that divides the {count} processes"
    require(fits, "distributed_replicas", expected, replicas)
    is_new = kind is not None and not exists
    if is_new:
        is_cuda = torch.cuda.is_available()
        if is_cuda:
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        backend = "cpu:gloo,cuda:nccl" if is_cuda else "gloo"
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
    logger = logging.getLogger("grpo_fast")
    level = logger.level
    if not is_main():
        logger.setLevel(logging.ERROR)
    try:
        with as_rank_error():
            yield
    finally:
        logger.setLevel(level)
        if is_new:
            dist.destroy_process_group()


# ------------------------------------------------------------------------------- Collectives
def gather(value: Any) -> list[Any]:
    """Return the values of all ranks, in the order of the ranks. All ranks must call this."""
    if size() == 1:
        return [value]
    values: list[Any] = [None] * size()
    dist.all_gather_object(values, value)
    return values


def from_main(make: Callable[[], Result]) -> Result:
    """Call `make` on rank 0, and return its value or raise its error on all ranks.

    All ranks must call this.
    """
    if size() == 1:
        return make()
    with together():
        value = [make()] if is_main() else [None]
    dist.broadcast_object_list(value, 0)
    return value[0]  # type: ignore[return-value]


def sum_(values: Tensor) -> Tensor:
    """Sum a tensor over the ranks in place, and return it. All ranks must call this."""
    if size() > 1:
        dist.all_reduce(values)
    return values


@contextmanager
def together(*, in_step: bool = False) -> Iterator[None]:
    """Re-raise an error from any rank on all ranks, with a message that names the rank.

    All ranks must enter this context. If several ranks fail, the error `Stopped`, which a signal
    causes, takes precedence. Otherwise the error of the lowest rank is raised. Code inside the
    context must not call collectives, because the other ranks would wait for a failed rank.

    Args:
        in_step: True if the code inside calls collectives, as the passes of sharded models do. The
            ranks then do not exchange errors. A rank with an error ends, and the other ranks wait
            for it until their timeout.
    """
    if size() == 1 or in_step:
        yield
        return
    mine: BaseException | None = None
    try:
        yield
    except (Exception, Stopped) as error:
        mine = error
    twins = gather(None if mine is None else _twin(mine))
    failed = [number for number, twin in enumerate(twins) if twin is not None]
    if not failed:
        return
    number = next((n for n in failed if isinstance(twins[n], Stopped)), failed[0])
    raised: Any = mine if number == rank() else twins[number]
    raised.is_on_all_ranks = True
    if raised is mine:
        raise raised
    raise raised from mine


def is_on_all_ranks(error: BaseException) -> bool:
    """Return True if all ranks raise this error, so that collectives can still be called."""
    return size() == 1 or hasattr(error, "is_on_all_ranks")


def _twin(error: BaseException) -> BaseException:
    """Return the error that the other ranks raise if this rank raises `error`."""
    if isinstance(error, Stopped):
        return Stopped(error.number)
    for kind in type(error).__mro__:
        if kind in SHARED:
            return kind(f"rank {rank()}: {error}")
    return RankError(f"rank {rank()}: {type(error).__name__}: {error}")


# ---------------------------------------------------------------------------------- Weights
@torch.no_grad()
def align(module: nn.Module) -> None:
    """Copy the weights and buffers of rank 0 to all ranks. All ranks must call this."""
    if size() == 1:
        return
    for tensor in (*module.parameters(), *module.buffers()):
        dist.broadcast(tensor, 0)


def sum_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Sum the gradients over the ranks. All ranks must call this.

    Gradients of sharded parameters are skipped, because FSDP2 has already summed them. Gradients
    are never averaged, because the losses are already divided by the counts of the whole step.
    """
    if size() == 1:
        return
    grads = [p.grad for p in parameters if p.grad is not None]
    plain = [grad for grad in grads if not hasattr(grad, "full_tensor")]
    for work in [dist.all_reduce(grad, async_op=True) for grad in plain]:
        work.wait()


def full_tensor(tensor: Tensor) -> Tensor:
    """Return a sharded tensor as a full tensor, and any other tensor unchanged.

    All ranks must call this.
    """
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def fill_(tensor: Any, full: Tensor) -> None:
    """Copy a full tensor into `tensor`. If `tensor` is sharded, copy only this rank's shard."""
    if hasattr(tensor, "full_tensor"):
        from torch.distributed.tensor import distribute_tensor

        # Every rank already has the full tensor, so `src_data_rank=None` avoids communication.
        full = distribute_tensor(
            full.to(tensor.device), tensor.device_mesh, tensor.placements, src_data_rank=None
        )
    tensor.copy_(full)
