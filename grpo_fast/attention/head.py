"""The head of a transformers causal LM: what turns the hidden states of packed rows into log-probabilities."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor, nn


class Head(NamedTuple):
    """logits = softcap·tanh(logit_scale·(hidden·weightᵀ + bias)/softcap), without the tanh when softcap is None."""

    weight: Tensor  # (V, H)
    bias: Tensor | None  # (V,)
    softcap: float | None
    logit_scale: float

    @property
    def rule(self) -> dict[str, Any]:
        """softcap and logit_scale, as keywords of `linear_logps` and of `LossConfig`."""
        return {"softcap": self.softcap, "logit_scale": self.logit_scale}


def head_of(lm: Any) -> Head:
    """Read the head of a transformers causal LM.

    Known rules: `final_logit_softcapping` (Gemma), `logit_scale` (Cohere, multiplies), `logits_scaling` (Granite,
    divides), `lm_head_multiplier` (Falcon-H1, multiplies). A model with any other has to be found by comparing logits.

    Raises ValueError for a head that is no plain linear layer (for example with a LoRA adapter on it).
    """
    layer = lm.get_output_embeddings()
    if type(layer) is not nn.Linear:
        raise ValueError(
            f"lm_head: expected torch.nn.Linear as output embeddings, got {type(layer).__name__} "
            "(with LoRA: leave it out of target_modules)"
        )
    scale = 1.0
    for name, inverse in (("logit_scale", False), ("lm_head_multiplier", False), ("logits_scaling", True)):
        value = getattr(lm.config, name, None)
        if value is not None:
            scale = scale / float(value) if inverse else scale * float(value)
    softcap = getattr(lm.config, "final_logit_softcapping", None)
    return Head(layer.weight, layer.bias, None if softcap is None else float(softcap), scale)
