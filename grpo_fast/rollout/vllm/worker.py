"""vLLM plugin that receives weights through gloo.

Start the server with `--weight-transfer-config '{"backend": "gloo"}'`. The plugin runs in the
server's worker processes. vLLM finds `register` through this package's entry point
`vllm.general_plugins` and calls it in each process.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

import torch
from vllm.distributed.weight_transfer import base, factory

from grpo_fast.rollout.vllm.transfer import GlooGroup, repack_heads


@dataclass
class InitInfo(base.WeightTransferInitInfo):
    """Address, size and timeout of the process group that the worker joins."""

    master_address: str
    master_port: int
    world_size: int
    rank_offset: int
    seconds: float


@dataclass
class UpdateInfo(base.WeightTransferUpdateInfo):
    """Names, dtypes and shapes of the tensors that follow, in the order of their broadcasts."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]


class GlooWorker(base.WeightTransferEngine[InitInfo, UpdateInfo]):
    """Transfer engine that receives weights through gloo and loads them into the model."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    group: GlooGroup | None = None

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        parallel = self.parallel_config
        before = parallel.data_parallel_index * parallel.world_size  # workers in earlier replicas
        rank = init_info.rank_offset + before + parallel.rank
        self.group = GlooGroup(
            init_info.master_address, init_info.master_port, init_info.world_size, rank,
            init_info.seconds,
        )  # fmt: skip

    def start_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: UpdateInfo) -> None:
        if self.group is None:
            raise RuntimeError("weights were announced before /init_weight_transfer_engine")
        tensors = zip(update_info.names, update_info.dtype_names, update_info.shapes, strict=True)
        # Broadcasts carry no names, so receive the tensors in the order in which they are sent.
        for name, dtype, shape in tensors:
            tensor = torch.empty(shape, dtype=getattr(torch, dtype))
            self.group.broadcast(tensor)
            self.model.load_weights([(name, tensor)])

    def finish_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)
        repack_heads(self.model)

    def shutdown(self) -> None:
        self.group = None


def register() -> None:
    """Add the transfer backend `gloo` to vLLM. Repeated calls have no effect."""
    with suppress(ValueError):  # vLLM raises if the name is registered already
        factory.WeightTransferEngineFactory.register_engine("gloo", GlooWorker)
