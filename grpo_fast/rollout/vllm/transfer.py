"""The named weights and adapters of a policy, and process groups that send weights to servers."""

from __future__ import annotations

import copy
import socket
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from grpo_fast.errors import require
from grpo_fast.rollout.vllm.answers import LoRAInfo

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


# ------------------------------------------------------------------------------------ LoRA adapters
def check_adapter(policy: Any, limits: LoRAInfo, url: str) -> None:
    """Check that vLLM would receive everything that is trained, and use all of it.

    vLLM itself refuses an adapter whose peft options it does not support.

    Args:
        policy: a policy with an adapter.
        limits: the LoRA settings of the server.
        url: the server, for the error message.

    Raises:
        ValueError: the rank is too large, vLLM would ignore a module, or weights outside of one
            adapter are trained.
    """
    where = f"rollout.vllm.urls: {url}"
    modules = adapted_modules(policy.lm)
    rank = max(max(module.r.values()) for module in modules.values())
    expected = f"a max_lora_rank of at least {rank}, the rank of the adapter"
    require(rank <= limits.max_lora_rank, where, expected, limits.max_lora_rank)
    targets = limits.target_modules
    leaves = sorted({name.rpartition(".")[2] for name in modules})
    ignored = [leaf for leaf in leaves if targets is not None and leaf not in targets]
    expected = f"lora_target_modules that include {', '.join(leaves)}"
    require(not ignored, where, expected, targets)
    active = {name for module in modules.values() for name in module.active_adapters}
    extras = [f"the adapters {', '.join(sorted(active))}"] * (len(active) > 1)
    trained = [n for n, p in policy.lm.named_parameters() if p.requires_grad and ".lora_" not in n]
    extras += [f"the trained weight {name}" for name in trained[:1]]
    # vLLM ignores the LoRA matrices of a module if its model has no module with the same name.
    names = checkpoint_tensors(policy.lm, merged=False).keys()
    unknown = [n for n, m in modules.items() if not m.lora_A or f"{n}.weight" not in names]
    extras += [f"the target module {name}" for name in unknown[:1]]
    expected = "one adapter of low-rank matrices (without --enable-lora, merged weights are sent)"
    require(not extras, where, expected, ", ".join(extras))


def write_adapter(policy: Any, folder: str, *, is_writer: bool = True) -> None:
    """Write the policy's adapter into a folder, in peft's format.

    If the weights are sharded, this is a collective call.

    Args:
        policy: the policy.
        folder: the folder from which vLLM loads the adapter. Earlier files are replaced.
        is_writer: False gathers sharded weights, but writes no files.
    """
    from peft import get_peft_model_state_dict
    from safetensors.torch import save_file

    name = next(iter(adapted_modules(policy.lm).values())).active_adapters[0]
    state = get_peft_model_state_dict(policy.model, adapter_name=name, save_embedding_layers=False)
    tensors = {
        key: (x.full_tensor() if hasattr(x, "full_tensor") else x).cpu().contiguous()
        for key, x in state.items()
    }
    if not is_writer:
        return
    save_file(tensors, Path(folder) / "adapter_model.safetensors")
    config = copy.copy(policy.lm.peft_config[name])
    # vLLM refuses kinds of initial values that change the base weights. Here it does receive the
    # changed base weights.
    config.init_lora_weights = True
    config.save_pretrained(folder)
