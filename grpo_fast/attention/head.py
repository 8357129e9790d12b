"""The head of a transformers causal LM, from hidden states to log-probabilities."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

# How far logps may stand from the model's own, by the dtype they are computed in (nats).
CHECK_TOLERANCE = {
    torch.float64: 1e-9, torch.float32: 1e-3, torch.bfloat16: 0.15, torch.float16: 0.05
}  # fmt: skip


class Head(NamedTuple):
    """logits = softcap·tanh(logit_scale·(hidden·weightᵀ + bias)/softcap), or without the tanh."""

    weight: Tensor  # (V, H)
    bias: Tensor | None  # (V,)
    softcap: float | None
    logit_scale: float

    @property
    def logit_kwargs(self) -> dict[str, Any]:
        """softcap and logit_scale, as keywords of `linear_logps` and of `LossConfig`."""
        return {"softcap": self.softcap, "logit_scale": self.logit_scale}


def check_tolerance(dtype: torch.dtype) -> float:
    """Nats (for logits: times their size) beyond which a self-check finds an unknown rule."""
    return CHECK_TOLERANCE.get(dtype, CHECK_TOLERANCE[torch.bfloat16])


def head_of(lm: Any) -> Head:
    """Read the head of a transformers causal LM.

    Known rules: `final_logit_softcapping` (Gemma), `logit_scale` (Cohere, multiplies),
    `logits_scaling` (Granite, divides), `lm_head_multiplier` (Falcon-H1, multiplies). A model with
    any other has to be found by comparing logits.

    Raises ValueError for a head that is no plain linear layer: with a LoRA adapter, or in an FSDP2
    group of its own, whose hooks do not fire for a weight that is read from outside.
    """
    layer = lm.get_output_embeddings()
    if type(layer) is not nn.Linear:
        raise ValueError(
            f"lm_head: expected torch.nn.Linear as output embeddings, got {type(layer).__name__} "
            "(with LoRA: leave it out of target_modules; with FSDP2: leave it to the root's group)"
        )
    scale = 1.0
    for name in ("logit_scale", "lm_head_multiplier", "logits_scaling"):
        value = getattr(lm.config, name, None)
        if value is not None:
            scale *= 1 / float(value) if name == "logits_scaling" else float(value)
    softcap = getattr(lm.config, "final_logit_softcapping", None)
    return Head(layer.weight, layer.bias, None if softcap is None else float(softcap), scale)
