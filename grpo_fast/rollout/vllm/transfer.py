"""The named weights of a policy, and process groups that send weights to servers."""

from __future__ import annotations

import copy
import socket
from collections.abc import Mapping
from datetime import timedelta
from functools import cache
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from grpo_fast.errors import require

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from grpo_fast.rollout.own.model import SampledModel


# peft calls this method to merge a wrapper that has it.
UNLOAD = "unload_and_optionally_merge_module"


@torch.no_grad()
def weights_of(lm: PreTrainedModel) -> dict[str, Tensor]:
    """Return all weights, keyed by their names in a checkpoint. Tied weights occur once.

    Adapters are merged into the weights. The tensors are contiguous and unsharded, so this is a
    collective call if the model's weights are sharded.

    Raises:
        ValueError: an adapter changes only one of two weights that the model's configuration ties.
            vLLM stores a single tensor for both.
    """
    from transformers.core_model_loading import revert_weight_conversion

    # keep_vars=True returns the parameters themselves, so tied parameters have the same id(). With
    # FSDP2, this call also reshards all parameters.
    named = lm.state_dict(keep_vars=True)
    # All wrappers of peft have the attribute `adapter_layer_names`. Unwrap only the outermost ones.
    # The cache keeps the unwrapped modules alive, so that no id() is reused. A module with two
    # names occurs under both in `named`.
    modules = lm.named_modules(remove_duplicate=False)
    wrappers = {n: m for n, m in modules if hasattr(m, "adapter_layer_names")}
    unwrap = cache(_unwrap)
    state: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in named.items():
        parents = accumulate(name.split("."), "{}.{}".format)
        outermost = next((parent for parent in parents if parent in wrappers), None)
        found = {name: tensor}
        if outermost is not None:
            module = unwrap(wrappers[outermost])
            found = module.state_dict(prefix=f"{outermost}.", keep_vars=True)
        state |= {key: value.detach() for key, value in found.items() if id(value) not in seen}
        seen |= {id(value) for value in found.values()}
    for name, source in lm.all_tied_weights_keys.items():
        expected = f"the weights of {source}, because the model's configuration ties them"
        advice = "leave both out of the adapter, or untie the model (tie_word_embeddings=False)"
        require(name not in state, name, expected, f"different ones; {advice}")
    state = revert_weight_conversion(lm, state)
    full = {n: x.full_tensor() if hasattr(x, "full_tensor") else x for n, x in state.items()}
    return {name: tensor.contiguous() for name, tensor in full.items()}


def _unwrap(wrapper: Any) -> nn.Module:
    """Return the wrapped module, with its active adapters merged."""
    if not hasattr(wrapper, "modules_to_save"):
        # Work on a copy, because peft merges in place. Fill it with full tensors, because peft's
        # formula for DoRA is wrong for shards. `deepcopy` uses the tensors in its second argument
        # in place of copies of the shards.
        shards = [p for p in wrapper.parameters() if hasattr(p, "full_tensor")]
        full = {id(p): nn.Parameter(p.full_tensor().clone(), False) for p in shards}
        wrapper = copy.deepcopy(wrapper, full)
    if hasattr(wrapper, UNLOAD):
        return getattr(wrapper, UNLOAD)(merge=True, safe_merge=False, adapter_names=None)
    wrapper.merge()
    return wrapper.get_base_layer()


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
        master_address: address of the trainer's machine.
        master_port: port of the group's store on that machine.
        world_size: number of processes, including the trainer.
        rank: rank of this process.
        seconds: timeout for joining the group and for each broadcast.
        listener: rank 0's listening socket. None for other ranks.

    Raises:
        RuntimeError: a process has ended, or the timeout has passed.
    """

    def __init__(
        self, master_address: str, master_port: int, world_size: int, rank: int, seconds: float,
        listener: socket.socket | None = None,
    ) -> None:  # fmt: skip
        limit = timedelta(seconds=seconds)
        # Without a socket, the store would listen at all addresses of the trainer's machine.
        self.store = dist.TCPStore(
            master_address, master_port, world_size, rank == 0, limit, wait_for_workers=False,
            master_listen_fd=None if listener is None else listener.detach(),
        )  # fmt: skip
        # By default gloo uses the address of the host name, which other machines may not reach.
        # Connecting a UDP socket sends no packet, but it reveals the local address on the route
        # to the trainer.
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((master_address, 9))
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
    """The trainer's side (rank 0) of vLLM's transfer engine `nccl`. Any thread may use it.

    Args:
        place: `master_address`, `master_port` and `world_size` of the process group.
        device: the GPU that sends the weights.
    """

    def __init__(self, place: Mapping[str, Any], device: torch.device) -> None:
        from vllm.distributed.weight_transfer.nccl_common import trainer_init

        with torch.cuda.device(device):
            self.group = trainer_init(dict(place))

    def broadcast(self, tensor: Tensor) -> None:
        with torch.cuda.device(tensor.device):
            stream = torch.cuda.current_stream()
            self.group.broadcast(tensor, src=0, stream=stream)
            stream.synchronize()
