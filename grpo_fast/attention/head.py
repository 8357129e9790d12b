"""LM head of a transformers causal LM, in the form that the loss functions accept."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from grpo_fast.kernels.reference import final_logits
from grpo_fast.kernels.types import LogitTransform

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Largest accepted difference in nats between a log-probability that is computed with a `Head` and
# the one that the model itself computes, for each dtype of the computation.
CHECK_TOLERANCE = {
    torch.float64: 1e-9, torch.float32: 1e-3, torch.bfloat16: 0.15, torch.float16: 0.05
}  # fmt: skip
# Configuration fields with the bound of the logits.
SOFTCAPS = "final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap"


class Head(NamedTuple):
    """LM head of a model: logits = softcap·tanh(logit_scale·(hidden·weightᵀ + bias)/softcap).

    Attributes:
        weight: (V, H). The weight.
        bias: (V,). The bias, or None.
        softcap: bound of the logits. None: no bound.
        logit_scale: factor by which the logits are multiplied.
    """

    weight: Tensor  # (V, H)
    bias: Tensor | None  # (V,)
    softcap: float | None
    logit_scale: float

    @property
    def logit_kwargs(self) -> dict[str, Any]:
        """Return softcap and logit_scale as keyword arguments for the loss functions."""
        return {"softcap": self.softcap, "logit_scale": self.logit_scale}

    def logits_of(self, product: Tensor) -> Tensor:
        """Return the logits (N, V) in fp32 for hidden·weightᵀ + bias."""
        return final_logits(product.float(), LogitTransform(self.logit_scale, self.softcap))[0]


def check_tolerance(dtype: torch.dtype) -> float:
    """Return the accepted difference in nats between two computations of a logp in `dtype`."""
    return CHECK_TOLERANCE.get(dtype, CHECK_TOLERANCE[torch.bfloat16])


def head_of(lm: PreTrainedModel) -> Head:
    """Return the LM head of a transformers causal LM.

    The result includes the transforms that models apply after the head: the fields in SOFTCAPS
    (Gemma, RecurrentGemma, xLSTM), `logit_scale` (Cohere, multiplies), `logits_scaling` (Granite,
    divides) and `lm_head_multiplier` (Falcon-H1, multiplies). If your model has a different
    transform, check once that `linear_logps` with this head gives the logps of the model.

    Args:
        lm: a transformers causal LM.

    Returns:
        The head. Its weight is the model's parameter, so gradients reach the model.

    Raises:
        ValueError: the output embeddings are not a plain nn.Linear. Either a LoRA adapter is on
            them, or FSDP2 wraps them as a separate group, whose hooks would not run.

    Example:
        >>> from transformers import Qwen2Config, Qwen2ForCausalLM
        >>> from grpo_fast.attention import head_of
        >>> config = Qwen2Config(
        ...     vocab_size=100, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
        ...     num_attention_heads=2, num_key_value_heads=1,
        ... )
        >>> head = head_of(Qwen2ForCausalLM(config))
        >>> head.weight.shape, head.logit_kwargs
        (torch.Size([100, 16]), {'softcap': None, 'logit_scale': 1.0})
    """
    layer = lm.get_output_embeddings()
    if type(layer) is not nn.Linear:
        raise ValueError(
            f"lm_head: expected torch.nn.Linear as output embeddings, got {type(layer).__name__} "
            "(with LoRA: leave lm_head out of target_modules; with FSDP2: do not wrap lm_head "
            "separately, so that it belongs to the root module's group)"
        )
    scale = 1.0
    for name in ("logit_scale", "lm_head_multiplier", "logits_scaling"):
        value = getattr(lm.config, name, None)
        if value is not None:
            scale *= 1 / float(value) if name == "logits_scaling" else float(value)
    softcaps = (getattr(lm.config, name, None) for name in SOFTCAPS)
    softcap = next((bound for bound in softcaps if bound is not None), None)
    return Head(layer.weight, layer.bias, None if softcap is None else float(softcap), scale)
