"""The named weights and adapters of a policy, and process groups that send weights to servers."""

from __future__ import annotations

import copy
import socket
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from grpo_fast.rollout.own.model import SampledModel


def adapted_modules(lm: PreTrainedModel) -> dict[str, Any]:
    """Return the modules with LoRA matrices, keyed by name. The dict may be empty."""
    return {n: m for n, m in lm.named_modules() if hasattr(m, "get_delta_weight")}


@torch.no_grad()
def weights_of(lm: PreTrainedModel, *, merged: bool = True) -> dict[str, Tensor]:
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
        if merged and name.endswith(".base_layer.weight"):
            module = adapted[name.removesuffix(".base_layer.weight")]
            for adapter in module.active_adapters:
                if adapter in module.r:  # an adapter may have matrices for other modules only
                    value = value + module.get_delta_weight(adapter)
        state[name.replace(".base_layer.", ".")] = value
    return revert_weight_conversion(lm, state)


def unsharded(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return contiguous, unsharded tensors. If a tensor is sharded, this is a collective call."""
    full = {n: x.full_tensor() if hasattr(x, "full_tensor") else x for n, x in state.items()}
    return {name: tensor.contiguous() for name, tensor in full.items()}


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
        self.store = dist.TCPStore(
            address, port, world_size, is_master=rank == 0, timeout=limit, wait_for_workers=False,
            master_listen_fd=None if listener is None else listener.detach(),
        )  # fmt: skip
        # By default gloo uses the address of the host name, which other machines may not reach.
        # Connecting a UDP socket sends no packet, but it reveals the local address on the route
        # to the trainer.
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
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
def can_send_adapter(policy: SampledModel) -> bool:
    """Return whether an update can send the policy's adapter alone, without the other weights.

    This is so if all trained weights are LoRA matrices of linear layers, and one adapter is active.
    """
    trained = [n for n, p in policy.lm.named_parameters() if p.requires_grad]
    active = {name for m in adapted_modules(policy.lm).values() for name in m.active_adapters}
    return len(active) == 1 and all(".lora_A." in n or ".lora_B." in n for n in trained)


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
    tensors = unsharded(state)
    if is_writer:
        save_file(tensors, Path(folder) / "adapter_model.safetensors")
        config = copy.copy(policy.lm.peft_config[name])
        # vLLM refuses kinds of initial values that change the base weights. Here it does receive
        # the changed base weights.
        config.init_lora_weights = True
        config.save_pretrained(folder)
