"""Options that save memory: gradient checkpointing and tiled MLPs.

`planning/memory_model.py` predicts how much each option saves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from grpo_fast.attention import offload_checkpoints, tile_mlps
from grpo_fast.train.config import ModelConfig, named_in

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Arguments of `torch.utils.checkpoint`. The state of the random generator need not be saved for the
# recomputation, because dropout is off everywhere in the trainer.
RECOMPUTE: dict[str, bool] = {"use_reentrant": False, "preserve_rng_state": False}


def apply_options(model: PreTrainedModel, config: ModelConfig) -> None:
    """Enable gradient checkpointing and tiled MLPs if the section `model` requests them."""
    if config.gradient_checkpointing:
        enable_checkpointing(model, config.gradient_checkpointing == "offload")
    if config.tiled_mlp is not None:
        with named_in("model"):  # errors refer to the setting `model.tiled_mlp`
            tile_mlps(model, config.tiled_mlp)


def enable_checkpointing(model: PreTrainedModel, offload: bool = False) -> None:
    """Recompute every layer in the backward pass instead of storing its activations.

    Args:
        model: a transformers model.
        offload: store the inputs of the layers in host memory. The corresponding option of
            transformers is not used, because it requires pinned memory and therefore a GPU.
    """
    newer = getattr(model, "activation_checkpointing_enable", None)  # since transformers 5.23
    (newer or model.gradient_checkpointing_enable)(RECOMPUTE)
    if offload:
        offload_checkpoints(model)
