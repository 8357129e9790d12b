"""Weights by their names in a checkpoint, and process groups that broadcast them."""

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

BUCKET = 1 << 28  # bytes that are gathered and sent together; a larger tensor is sent alone
Named = list[tuple[str, Tensor]]
Result = TypeVar("Result")


def buckets(policy: Any) -> Iterator[Named]:
    """Yield all weights of a `Policy` in buckets, with adapters merged.

    Gathering sharded tensors is collective: every rank must iterate over all buckets.
    """
    bucket: Named = []
    size = 0
    for name, tensor in _stored(policy.lm).items():
        if hasattr(tensor, "full_tensor"):
            tensor = tensor.full_tensor()
        if bucket and size + tensor.nbytes > BUCKET:
            yield bucket
            bucket = []
            size = 0
        bucket.append((name, tensor.contiguous()))
        size += tensor.nbytes
    if bucket:
        yield bucket


@torch.no_grad()
def _stored(lm: Any) -> dict[str, Tensor]:
    """Return the tensors by their names in a checkpoint of this model, tied tensors once."""
    from transformers.core_model_loading import revert_weight_conversion

    adapted = {n: m for n, m in lm.named_modules() if hasattr(m, "get_delta_weight")}
    state: dict[str, Tensor] = {}
    seen: set[int] = set()
    # keep_vars returns the parameters themselves: tied ones are found by their equal ids.
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

    Only layers with the same name are compared: vLLM fuses some linear layers under a new name.

    Args:
        served: vLLM's text of its model, such as `(o_proj): RowParallelLinear(in_features=64, …`.
    """
    ours = {n.replace(".base_layer", ""): sorted(p.shape) for n, p in lm.state_dict().items()}
    path: list[str] = []
    shapes: dict[str, tuple[Any, Any]] = {}  # name -> theirs, ours
    for depth, name, text in re.findall(r"^((?:  )+)\(([\w, -]+)\): (.*)", served, re.M):
        numbers = re.findall(r"\d+", name) if name[0].isdigit() else []  # of equal layers
        path = [*path[: len(depth) // 2 - 1], *(numbers[:1] or [name])]
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
        # Parallel parts of a QKVParallelLinear share key heads, so its size says little.
        if theirs[0] and len(here) == 2 and not text.startswith("QKV"):
            shapes[".".join(path)] = theirs, here
    for name, (there, here) in shapes.items():
        other = f"another at {url}: {name} is {there} there, {here} here"
        require(there == here or not here, "rollout.vllm.urls", "this run's model", other)


class GlooGroup:
    """Group of the trainer (rank 0) and the workers of one server, by gloo on the CPU.

    Args:
        seconds: timeout of joining and of each broadcast.
        listener: rank 0's socket at `address`; None for other ranks.

    Raises:
        RuntimeError: a peer is gone, or the timeout is over.
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
        """Send a tensor from rank 0 to all ranks and wait until it has arrived."""
        self.group.broadcast([tensor.cpu()], dist.BroadcastOptions()).wait()


class NCCLGroup:
    """Rank 0 of the group that vLLM's transfer engine `nccl` forms. Any thread may call it."""

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
    """Run `work` on a daemon thread, which does not keep the process from ending."""
    future: Future[Result] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future
