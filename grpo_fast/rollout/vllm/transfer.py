"""The named weights of a policy, and process groups that broadcast them to vLLM servers."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from grpo_fast.rollout.own.model import SampledModel

BUCKET = 1 << 28  # most bytes of a bucket, unless one tensor is larger
Named = list[tuple[str, Tensor]]


def buckets(policy: SampledModel, *, merged: bool = True) -> Iterator[Named]:
    """Yield all weights of a `Policy` in buckets.

    If the weights are sharded, this is a collective call. Every rank must iterate over all buckets.

    Args:
        policy: the policy.
        merged: merge the adapter into the weights. False yields the weights of the base model.
    """
    bucket: Named = []
    size = 0
    for name, tensor in checkpoint_tensors(policy.lm, merged=merged).items():
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


def adapted_modules(lm: PreTrainedModel) -> dict[str, Any]:
    """Return the modules with LoRA matrices, keyed by name. The dict may be empty."""
    return {n: m for n, m in lm.named_modules() if hasattr(m, "get_delta_weight")}


@torch.no_grad()
def checkpoint_tensors(lm: PreTrainedModel, *, merged: bool) -> dict[str, Tensor]:
    """Return all weights, keyed by their names in a checkpoint. Tied weights occur once.

    Args:
        lm: the model.
        merged: merge the adapter into the weights. False returns the weights of the base model.
    """
    from transformers.core_model_loading import revert_weight_conversion

    adapted = adapted_modules(lm)
    state: dict[str, Tensor] = {}
    seen: set[int] = set()
    # keep_vars=True returns the parameters themselves, so tied parameters have the same id().
    for name, tensor in lm.state_dict(keep_vars=True).items():
        if ".lora_" in name or id(tensor) in seen:
            continue
        seen.add(id(tensor))
        value = tensor.detach()
        if name.endswith(".base_layer.weight"):
            module = adapted[name.removesuffix(".base_layer.weight")]
            for adapter in module.active_adapters if merged else ():
                value = value + module.get_delta_weight(adapter)
        state[name.replace(".base_layer.", ".")] = value
    return revert_weight_conversion(lm, state)


def repack_heads(model: Any) -> None:
    """Rebuild the packed weights of vLLM's LM head on a CPU after a reload.

    On a CPU, vLLM computes the head from a packed copy of its weights. A reload does not update
    this copy if the head is tied to the embedding, because no weights are loaded under the head's
    name.
    """
    for module in model.modules():
        if type(module).__name__ == "ParallelLMHead" and hasattr(module, "cpu_linear"):
            module.quant_method.process_weights_after_loading(module)


def dtype_of(policy: SampledModel) -> str:
    """Return the dtype in which the policy computes, such as "bfloat16"."""
    return str(policy.autocast or policy.lm.get_output_embeddings().weight.dtype)[len("torch.") :]


def family_of(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


class GlooGroup:
    """Gloo process group of the trainer (rank 0) and the workers of one server, on the CPU.

    Args:
        address: address of the trainer's machine.
        port: port of the group's store on that machine.
        rank: rank of this process.
        world_size: number of processes, including the trainer.
        seconds: timeout for joining the group and for each broadcast.
        listener: rank 0's listening socket at `address`. None for other ranks.

    Raises:
        RuntimeError: a process has ended, or the timeout has passed.
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
        # By default gloo uses the address of the host name, which other machines may not reach.
        # Connecting a UDP socket sends no packet, but it reveals the local address on the route
        # to the trainer.
        with socket.socket(family_of(address), socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))
            own_address = str(probe.getsockname()[0])
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._timeout = limit
        options._devices = [gloo.create_device(hostname=own_address)]
        store = dist.PrefixStore("weights", self.store)
        self.group = gloo(store, rank, world_size, options)

    def broadcast(self, tensor: Tensor) -> None:
        """Send a tensor from rank 0 to all ranks, and wait until all of them have it."""
        self.group.broadcast([tensor.cpu()], dist.BroadcastOptions()).wait()


class NCCLGroup:
    """The trainer's side (rank 0) of vLLM's transfer engine `nccl`. Any thread may use it."""

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
