"""A policy's weights by their names in a checkpoint, and groups of processes to send them in."""

from __future__ import annotations

import re
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from grpo_fast.errors import require

BUCKET = 1 << 28  # bytes that are gathered and sent at a time; a larger tensor goes alone
Named = list[tuple[str, Tensor]]
Result = TypeVar("Result")


def buckets(policy: Any) -> Iterator[Named]:
    """All weights of a `Policy`, some at a time, adapters merged in.

    Sharded tensors are made whole, which is a collective: every rank runs through all buckets.
    """
    bucket: Named = []
    size = 0
    for name, tensor in _stored(policy.lm).items():
        whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        if bucket and size + whole.nbytes > BUCKET:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, whole.contiguous()))
        size += whole.nbytes
    if bucket:
        yield bucket


@torch.no_grad()
def _stored(lm: Any) -> dict[str, Tensor]:
    """Name → tensor, as a checkpoint of this model has them; tied tensors once."""
    from transformers.core_model_loading import revert_weight_conversion

    adapted = {n: m for n, m in lm.named_modules() if hasattr(m, "get_delta_weight")}
    state: dict[str, Tensor] = {}
    seen: set[int] = set()
    # keep_vars: detached tensors would have ids of their own, and no tie would show.
    for name, tensor in lm.state_dict(keep_vars=True).items():
        if ".lora_" in name or id(tensor) in seen:
            continue
        seen.add(id(tensor))
        value = tensor.detach()
        if name.endswith(".base_layer.weight"):
            module = adapted[name.removesuffix(".base_layer.weight")]
            for adapter in module.active_adapters:
                value = value + module.get_delta_weight(adapter)
        state[name.replace(".base_layer.", ".")] = value
    return revert_weight_conversion(lm, state)


def dtype_of(policy: Any) -> str:
    return str(policy.autocast or policy.lm.get_output_embeddings().weight.dtype)[len("torch.") :]


def check_shapes(lm: Any, served: str, url: str) -> None:
    """Raise a ValueError for a server whose model has other layers, or other shapes, than `lm`.

    Only what both name alike is compared; vLLM fuses some linear layers under names of its own.

    served: vLLM's account of its model, such as `(o_proj): RowParallelLinear(in_features=64, …`.
    """
    ours = {n.replace(".base_layer", ""): sorted(p.shape) for n, p in lm.state_dict().items()}
    path: list[str] = []
    shapes: dict[str, tuple[Any, Any]] = {}  # name → theirs, ours
    for depth, name, text in re.findall(r"^((?:  )+)\(([\w, -]+)\): (.*)", served, re.M):
        numbers = re.findall(r"\d+", name) if name[0].isdigit() else []  # of layers all alike
        path = [*path[: len(depth) // 2 - 1], numbers[0] if numbers else name]
        if numbers:
            parent = ".".join(path[:-1])
            count = max(int(numbers[-1]) + 1, shapes.get(parent, (0, 0))[0])
            below = (n.removeprefix(f"{parent}.") for n in ours if n.startswith(f"{parent}."))
            own = {n.partition(".")[0] for n in below}
            shapes[parent] = count, len(own)
        size = Counter({key: int(value) for key, value in re.findall(r"\b(\w+)=(\d+)", text)})
        divided = "in_features" if text.startswith("RowParallel") else "output_features"
        size[divided] *= size.get("tp_size", 1)
        rows = size["org_vocab_size"] or size["num_embeddings"] or size["output_features"]
        theirs = sorted((rows, size["embedding_dim"] or size["in_features"]))
        here = ours.get(".".join((*path, "weight")), ())
        # Of few key heads each part of a QKVParallelLinear has a copy.
        if theirs[0] and len(here) == 2 and not text.startswith("QKV"):
            shapes[".".join(path)] = theirs, here
    for name, (there, here) in shapes.items():
        other = f"another at {url}: {name} is {there} there, {here} here"
        require(there == here or not here, "rollout.vllm.urls", "this run's model", other)


# ----------------------------------------------------------------------------------------- groups
class GlooGroup:
    """The trainer, rank 0, and the workers of one server, by torch's gloo on the CPU.

    `listener` is rank 0's socket at `address`, else None. Raises RuntimeError when a peer is gone
    or `seconds` are over.
    """

    def __init__(
        self, address: str, port: int, rank: int, world_size: int, seconds: float,
        listener: socket.socket | None = None,
    ) -> None:  # fmt: skip
        limit = timedelta(seconds=seconds)
        listening: Any = {} if listener is None else {"master_listen_fd": listener.detach()}
        self.store = dist.TCPStore(
            address, port, world_size, is_master=rank == 0, timeout=limit, wait_for_workers=False,
            **listening,
        )  # fmt: skip
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # nothing is sent
            probe.connect((address, 9))
            own_address = str(probe.getsockname()[0])  # of this machine, seen from there
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._timeout = limit
        options._devices = [gloo.create_device(hostname=own_address)]
        store = dist.PrefixStore("weights", self.store)
        self.group = gloo(store, rank, world_size, options)

    def broadcast(self, tensor: Tensor) -> None:
        """From rank 0 to all; returns when it has arrived."""
        self.group.broadcast([tensor.cpu()], dist.BroadcastOptions()).wait()


class NCCLGroup:
    """Rank 0 of the group that vLLM's own engine `nccl` makes; calls come from other threads."""

    def __init__(self, address: str, port: int, world_size: int, device: torch.device) -> None:
        from vllm.distributed.weight_transfer.nccl_common import trainer_init

        where = {"master_address": address, "master_port": port, "world_size": world_size}
        with torch.cuda.device(device):
            self.group = trainer_init(where)

    def broadcast(self, tensor: Tensor) -> None:
        with torch.cuda.device(tensor.device):
            stream = torch.cuda.current_stream()
            self.group.broadcast(tensor, src=0, stream=stream)
            stream.synchronize()


def started(work: Callable[[], Result]) -> Future[Result]:
    """Run `work` on a daemon thread. Wait for the result with a timeout."""
    future: Future[Result] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future
