"""The language-model head as the loss needs it: weight, bias and the rules that turn hidden states into logits."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor, nn


class Head(NamedTuple):
    """logits = softcap·tanh(logit_scale·(hidden·weightᵀ + bias)/softcap), without the tanh when softcap is None."""

    weight: Tensor  # (V, H)
    bias: Tensor | None  # (V,)
    softcap: float | None
    logit_scale: float


def head_of(lm: Any) -> Head:
    """Read the head of a transformers causal LM.

    Known rules: `final_logit_softcapping` (Gemma), `logit_scale` (Cohere, multiplies), `logits_scaling` (Granite,
    divides), `lm_head_multiplier` (Falcon-H1, multiplies). `Policy.self_check` finds a model with any other.

    Raises ValueError for a head that is no plain linear layer (for example with a LoRA adapter on it).
    """
    layer = lm.get_output_embeddings()
    if type(layer) is not nn.Linear:
        raise ValueError(
            f"lm_head: expected torch.nn.Linear, came {type(layer).__name__} "
            "(leave it out of model.lora.target_modules)"
        )
    config = lm.config
    scale = 1.0
    for name, inverse in (("logit_scale", False), ("lm_head_multiplier", False), ("logits_scaling", True)):
        value = getattr(config, name, None)
        if value is not None:
            scale = scale / float(value) if inverse else scale * float(value)
    softcap = getattr(config, "final_logit_softcapping", None)
    return Head(layer.weight, layer.bias, None if softcap is None else float(softcap), scale)
