"""The processes (ranks) of a run: collectives, signals, and weights sharded with FSDP2.

All ranks run the same program, and rank 0 prints and writes. An exception on one rank ends the
process of this rank, and the launcher then ends the other processes. If torch has no default
process group, every function treats this process as the only rank. torch pickles the objects that
ranks exchange. This is safe, because one launcher started all ranks.

FSDP2 gathers the weights of a decoder layer when the layer is computed. The embedding, the final
norm and the LM head belong to the root module, whose weights are gathered inside
`model.inside(work)`.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import types
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from grpo_fast.errors import RankError, Stopped, require

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Result = TypeVar("Result")
Error = TypeVar("Error", bound=BaseException)

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


# ------------------------------------------------------------------------- Process group and errors
def size() -> int:
    """Return the number of ranks. It is 1 if there is no process group."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """Return the number of this rank, counted from 0."""
    return dist.get_rank() if size() > 1 else 0


def is_main() -> bool:
    """Return True on rank 0."""
    return rank() == 0


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
        RankError: another rank has ended, or has not answered in `timeout_s` seconds.
    """
    exists = dist.is_available() and dist.is_initialized()
    count = dist.get_world_size() if exists else int(os.environ.get("WORLD_SIZE", "1"))
    fits = kind is not None or count == 1
    require(fits, "distributed", f"ddp, fsdp2 or hsdp for {count} processes", "none")
    fits = kind is None or exists or "RANK" in os.environ
    expected = "processes (torchrun --nproc-per-node 2 -m grpo_fast train …)"
    require(fits, "distributed", expected, f"{kind} and only one")
    expected = f"a number that divides the {count} processes"
    require(count % (replicas or 1) == 0, "distributed_replicas", expected, replicas)
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
        yield
    except RuntimeError as error:
        if not (isinstance(error, dist.DistError) or "gloo/" in str(error)):
            raise
        said = "a rank, which torchrun names, has ended or not answered in distributed_timeout"
        notes = [str(error).splitlines()[0][:200], *getattr(error, "__notes__", ())]
        raise RankError(f"{said} seconds: {'; '.join(notes)}") from error
    finally:
        logger.setLevel(level)
        if is_new:
            dist.destroy_process_group()


def common(error: Error) -> Error:
    """Mark an error that all ranks raise at the same point, so that they can still save the run."""
    vars(error)["is_common"] = True
    return error


def is_common(error: BaseException) -> bool:
    """Return True if all ranks raise this error, so that collectives can still be called."""
    return size() == 1 or "is_common" in vars(error)


# ------------------------------------------------------------------------------- Collectives
def gather(value: Any) -> list[Any]:
    """Return the values of all ranks, in the order of the ranks."""
    if size() == 1:
        return [value]
    values: list[Any] = [None] * size()
    dist.all_gather_object(values, value)
    return values


def from_main(make: Callable[[], Result]) -> Result:
    """Call `make` on rank 0, and return its value on all ranks.

    If `make` raises an error, rank 0 raises the error, and the other ranks a RankError.
    """
    if size() == 1:
        return make()
    answer: list[Any] = [None, None]  # the value, and the message of an error
    failure = None
    if is_main():
        try:
            answer[0] = make()
        except Exception as error:
            failure = error
            answer[1] = f"rank 0: {type(error).__name__}: {error}"
    dist.broadcast_object_list(answer, 0)
    if answer[1] is not None:
        raise common(failure or RankError(answer[1]))
    return answer[0]  # type: ignore[no-any-return]


def sum_(values: Tensor) -> Tensor:
    """Sum a tensor over the ranks in place, and return it."""
    if size() > 1:
        dist.all_reduce(values)
    return values


# ---------------------------------------------------------------------------------- Weights
@torch.no_grad()
def align(module: nn.Module) -> None:
    """Copy the weights and buffers of rank 0 to all ranks."""
    if size() == 1:
        return
    for tensor in (*module.parameters(), *module.buffers()):
        dist.broadcast(tensor, 0)


def sum_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Sum the gradients over the ranks.

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
    """Return a sharded tensor as a full tensor, and any other tensor unchanged."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def shard_all(models: Iterable[Any], device: torch.device, replicas: int | None) -> None:
    """Shard models over the ranks.

    Args:
        models: objects with a method `shard(mesh)`. None entries are skipped.
        device: device of the shards.
        replicas: number of ranks that store the same shard. None means 1.
    """
    from torch.distributed.device_mesh import init_device_mesh

    shape = (size(),) if replicas is None else (replicas, size() // replicas)
    names = ("replicate", "shard")[-len(shape) :]
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)
    for model in filter(None, models):
        model.shard(mesh)


def shard(model: Any, mesh: DeviceMesh) -> None:
    """Replace the weights of a model, which all ranks have in full, by this rank's shards.

    Args:
        model: the model.
        mesh: device mesh of the ranks.
    """
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
    from transformers.modeling_layers import GradientCheckpointingLayer

    # FSDP2 warns that its output is a view, because in-place writes to views are wrong. The hidden
    # states are a view, but the trainer never writes to them in place.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
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
    model.inside = types.MethodType(lambda _, work: work(), model)
    register_fsdp_forward_method(model, "inside")
    # FSDP2 assigns parameters to groups in the first forward pass of the root module, so run an
    # empty pass here.
    with torch.no_grad():
        model.inside(lambda: None)
    model.reshard()


@contextmanager
def unsharded(model: Any) -> Iterator[None]:
    """Gather all weights on every rank, and shard them again at the end.

    Forward passes inside the context do not communicate with other ranks, so the ranks may run
    different numbers of them.
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


# ------------------------------------------------------------------------------------------ Signals
class Stopping:
    """Handler of SIGTERM, SIGINT and SIGHUP. After a signal, the run ends with `Stopped`.

    A single process raises the exception at once if its weights have not changed since the last
    finished step. Otherwise, and with several ranks, the run first finishes its step. A second
    signal ends the process immediately.
    """

    def __init__(self) -> None:
        self.number: int | None = None  # number of the received signal
        self.may_stop: Callable[[], bool] = lambda: True

    def receive(self, number: int) -> None:
        """Remember a signal. Raise `Stopped` if the run may stop at this point."""
        self.number = number
        if size() == 1 and self.may_stop():
            raise Stopped(number)

    def raise_together(self) -> None:
        """Raise `Stopped` on all ranks if any rank has received a signal."""
        number = next((x for x in gather(self.number) if x is not None), None)
        if number is not None:
            raise common(Stopped(number))

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Handle signals inside this context.

        Python handles signals only in its main thread. In any other thread, the context has no
        effect.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.getsignal(number) for number in SIGNALS}
        # Do not handle a signal that is already ignored. For example, nohup ignores SIGHUP, so that
        # a run continues when its terminal closes.
        handled = [number for number in SIGNALS if before[number] is not signal.SIG_IGN]

        def stop(number: int, _: object) -> None:
            for each in handled:  # the next signal ends the process immediately
                signal.signal(each, signal.SIG_DFL)
            self.receive(number)

        for number in handled:
            signal.signal(number, stop)
        try:
            yield
        finally:
            for number in handled:
                signal.signal(number, before[number] or signal.SIG_DFL)
