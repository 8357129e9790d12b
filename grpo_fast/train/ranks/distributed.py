"""The processes (ranks) of a run: their number, collectives, and errors that all ranks raise.

Without torch's default process group every function works for a single rank. torch pickles the
objects that ranks exchange. This is safe, because all ranks belong to one launch.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from grpo_fast.errors import (
    EngineError,
    NonFiniteLogits,
    RankError,
    RewardError,
    Stopped,
    WriteError,
    require,
)

Result = TypeVar("Result")

LAUNCH = "torchrun --nproc-per-node 2 -m grpo_fast train …"
REPORT_S = 5.0  # after an error, a rank that does not report within these seconds is dead
# If a rank raises an error of one of these classes, all ranks raise the same class. Errors of other
# classes become a RankError on the other ranks.
SHARED: dict[str, Callable[[str], BaseException]] = {
    kind.__name__: kind
    for kind in (ValueError, MemoryError, torch.OutOfMemoryError, NonFiniteLogits, EngineError,
                 RewardError, WriteError)
}  # fmt: skip
_is_alone = False
_store: list[dist.Store] = []  # the launcher's store, in which ranks report that they are alive


# ----------------------------------------------------------------------------- Number of ranks
def size() -> int:
    """Return the number of ranks. It is 1 if there is no process group."""
    is_met = dist.is_available() and dist.is_initialized() and not _is_alone
    return dist.get_world_size() if is_met else 1


def rank() -> int:
    """Return the number of this rank, counted from 0."""
    return dist.get_rank() if size() > 1 else 0


@contextmanager
def alone() -> Iterator[None]:
    """Make this rank work as a single process. Inside, `size()` is 1 and no call is collective."""
    global _is_alone
    _is_alone = True
    try:
        yield
    finally:
        _is_alone = False


def launched_rank() -> int:
    """Return the rank that the launcher assigned, which is known even without a process group."""
    return int(os.environ.get("RANK", "0"))


def is_main() -> bool:
    """Return True on rank 0."""
    return rank() == 0


@contextmanager
def naming_dead_ranks() -> Iterator[None]:
    """Convert an error in a collective to a RankError that names the ranks that do not respond.

    Enter this context after installing the signal handlers, because torchrun sends SIGTERM to all
    other ranks when a rank dies.
    """
    try:
        yield
    except RuntimeError as error:
        is_known = isinstance(error, dist.DistError) or "gloo/" in str(error)
        if isinstance(error, RankError) or not is_known:
            raise
        missing = _missing()
        said = f"rank {', '.join(map(str, missing))}" if missing else "a rank"
        said += " has ended or does not answer in distributed_timeout seconds"
        raise RankError(f"{said}: {str(error).splitlines()[0][:200]}") from error


def _missing() -> list[int]:
    """Return the ranks that do not report in the launcher's store within REPORT_S seconds."""
    if not _store:
        return []
    others = set(range(size())) - {rank()}
    try:
        _store[0].set(f"here/{rank()}", "1")
        until = time.monotonic() + REPORT_S
        while others and time.monotonic() < until:
            others -= {r for r in others if _store[0].check([f"here/{r}"])}
            time.sleep(0.05)
    except RuntimeError:  # the store ended with torchrun or with rank 0
        return [] if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else [0]
    return sorted(others)


@contextmanager
def process_group(kind: str | None, replicas: int | None, timeout_s: float) -> Iterator[None]:
    """Join the launcher's process group, and leave it at the end. An existing group is reused.

    Args:
        kind: value of the setting `distributed`.
        replicas: value of the setting `distributed_replicas`.
        timeout_s: seconds that a rank waits for the others.

    Raises:
        ValueError: there are several ranks and no `kind`, or a `kind` and no launcher, or
            `replicas` does not divide the number of ranks.
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
    if kind is None or exists:
        with naming_dead_ranks(), _quiet(rank()):
            yield
        return
    is_cuda = torch.cuda.is_available()
    if is_cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    store, number, count = next(dist.rendezvous("env://"))
    _store.append(store)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if is_cuda else "gloo", timeout=timedelta(seconds=timeout_s),
        store=dist.PrefixStore("grpo_fast", store), rank=number, world_size=count,
    )  # fmt: skip
    try:
        with naming_dead_ranks(), _quiet(number):
            yield
    finally:
        _store.clear()
        dist.destroy_process_group()


@contextmanager
def _quiet(number: int) -> Iterator[None]:
    """Restrict logging to errors on all ranks except rank 0."""
    logger = logging.getLogger("grpo_fast")
    before = logger.level
    logger.setLevel(before if number == 0 else logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


# ------------------------------------------------------------------------------- Collectives
def gather(value: Any) -> list[Any]:
    """Return the values of all ranks, in the order of the ranks. Collective call."""
    if size() == 1:
        return [value]
    values: list[Any] = [None] * size()
    dist.all_gather_object(values, value)
    return values


def from_main(make: Callable[[], Result]) -> Result:
    """Call `make` on rank 0. Return its value or raise its error on all ranks. Collective call."""
    if size() == 1:
        return make()
    with together():
        value = [make()] if is_main() else [None]
    dist.broadcast_object_list(value, 0)
    return value[0]  # type: ignore[return-value]


def sum_(values: Tensor) -> Tensor:
    """Sum a tensor over the ranks in place, and return it. Collective call."""
    if size() > 1:
        dist.all_reduce(values)
    return values


@contextmanager
def together(*, in_step: bool = False) -> Iterator[None]:
    """Re-raise an error from any rank on all ranks. The message names the rank. Collective call.

    If several ranks fail, a signal takes precedence. Without a signal, the error of the lowest rank
    is raised. Code inside the context must not call collectives, because the other ranks would wait
    for a failed rank.

    Args:
        in_step: True if the code inside calls collectives, as sharded models do. Errors are then
            not exchanged. A failing rank ends, and the other ranks time out.
    """
    if size() == 1 or in_step:
        yield
        return
    mine: BaseException | None = None
    try:
        yield
    except (Exception, Stopped) as error:
        mine = error
    said = gather(None if mine is None else _described(mine))
    failed = [(number, *one) for number, one in enumerate(said) if one is not None]
    if not failed:
        return
    stopped = [one for one in failed if one[1] == Stopped.__name__]
    number, kind, text = (stopped or failed)[0]
    if mine is not None and number == rank():
        mine.is_on_all_ranks = True  # type: ignore[attr-defined]
        raise mine
    twin = _twin(number, kind, text)
    twin.is_on_all_ranks = True  # type: ignore[attr-defined]
    raise twin from mine


def is_on_all_ranks(error: BaseException) -> bool:
    """Return True if all ranks raise this error, so that collectives can still be called."""
    return size() == 1 or hasattr(error, "is_on_all_ranks")


def _described(error: BaseException) -> tuple[str, str]:
    """Return the name of an error's class and its text, from which `_twin` rebuilds the error."""
    kinds = (kind.__name__ for kind in type(error).__mro__)
    kind = next((name for name in kinds if name in SHARED), type(error).__name__)
    return kind, str(error.number if isinstance(error, Stopped) else error)


def _twin(number: int, kind: str, text: str) -> BaseException:
    """Return a copy of the error of rank `number`, for raising it on the other ranks."""
    if kind == Stopped.__name__:
        return Stopped(int(text))
    if kind in SHARED:
        return SHARED[kind](f"rank {number}: {text}")
    return RankError(f"rank {number}: {kind}: {text}")


# ---------------------------------------------------------------------------------- Weights
@torch.no_grad()
def align(modules: Iterable[nn.Module]) -> None:
    """Copy the weights and buffers of rank 0 to all ranks. Collective call."""
    if size() == 1:
        return
    for module in modules:
        for tensor in (*module.parameters(), *module.buffers()):
            dist.broadcast(tensor, 0)


def sum_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Sum the gradients over the ranks. Collective call.

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
    """Return a sharded tensor as a full tensor, or any other tensor unchanged. Collective call."""
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
