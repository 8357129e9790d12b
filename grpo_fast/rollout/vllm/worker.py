"""The server's half of the gloo transfer: `--weight-transfer-config '{"backend": "gloo"}'`.

vLLM calls `register`, the entry point `vllm.general_plugins` of this package, in each process.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

import torch
from vllm.distributed.weight_transfer import base, factory

from grpo_fast.rollout.vllm.transfer import GlooGroup


@dataclass
class Meeting(base.WeightTransferInitInfo):
    master_address: str
    master_port: int
    world_size: int
    rank_offset: int
    seconds: float


@dataclass
class Announced(base.WeightTransferUpdateInfo):
    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]


class GlooWorker(base.WeightTransferEngine[Meeting, Announced]):
    """Receives weights from the trainer by gloo and loads them into the model."""

    init_info_cls = Meeting
    update_info_cls = Announced
    group: GlooGroup | None = None

    def init_transfer_engine(self, init_info: Meeting) -> None:
        parallel = self.parallel_config
        earlier = parallel.data_parallel_index * parallel.world_size
        rank = init_info.rank_offset + earlier + parallel.rank
        store = init_info.master_address, init_info.master_port
        self.group = GlooGroup(*store, rank, init_info.world_size, init_info.seconds)

    def start_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: Announced) -> None:
        if self.group is None:
            raise RuntimeError("weights were announced before /init_weight_transfer_engine")
        announced = zip(update_info.names, update_info.dtype_names, update_info.shapes, strict=True)
        # Broadcasts carry no names: receive in the order in which the trainer sends.
        for name, dtype, shape in announced:
            tensor = torch.empty(shape, dtype=getattr(torch, dtype))
            self.group.broadcast(tensor)
            self.model.load_weights([(name, tensor)])

    def finish_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        self.group = None


def register() -> None:
    """Add the backend `gloo` to vLLM. Further calls change nothing."""
    with suppress(ValueError):  # it is registered already
        factory.WeightTransferEngineFactory.register_engine("gloo", GlooWorker)
