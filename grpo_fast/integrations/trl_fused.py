"""Where TRL keeps its fused LM head, and what that head knows of the model's logits.

TRL (>= 1.16) gives one model object a `forward` of its own (`trl.trainer.utils.add_fused_lm_head`),
a closure over the rule of the logits.
"""

from __future__ import annotations

import inspect
import types
from typing import Any, NamedTuple

import torch
from torch import Tensor

from grpo_fast.integrations.fast_head import compute_dtype


class FusedHead(NamedTuple):
    """What TRL's fused forward knows of the head: z = softcap·tanh(logit_scale·(h·Wᵀ +
    bias)/softcap)/temperature.
    """

    backbone: str  # attribute of the model that gives hidden states
    temperature: float
    softcap: float | None
    logit_scale: float
    cast_to_fp32: bool

    @property
    def rule(self) -> dict[str, Any]:
        """As keywords of `linear_logps` and of `LossConfig`."""
        return {
            "temperature": self.temperature,
            "softcap": self.softcap,
            "logit_scale": self.logit_scale,
        }

    def operands(self, layer: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """hidden, weight and bias in the dtype TRL projects in: autocast's, fp32 when cast, else
        that of hidden.
        """
        dtype = torch.float32 if self.cast_to_fp32 else compute_dtype(hidden)
        bias = None if layer.bias is None else layer.bias.to(dtype)
        return hidden.to(dtype), layer.weight.to(dtype), bias


def base_model(model: Any) -> Any:
    """The transformers model inside a peft model, or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def fused_head(model: Any) -> FusedHead:
    """The head that `add_fused_lm_head` gave this model. ValueError when it has none, or one we do
    not know.
    """
    known = inspect.getclosurevars(require_fused(model)).nonlocals
    try:
        return FusedHead(
            known["backbone_attr"], float(known["temperature"]), known["final_logit_softcapping"],
            float(known["logit_scale"]), bool(known["cast_lm_head_to_fp32"]),
        )  # fmt: skip
    except KeyError as missing:
        raise ValueError(
            f"trl {trl_version()}: expected {missing} in the fused LM head, as in trl 1.16"
        ) from None


def fused_function(model: Any) -> types.FunctionType | None:
    """TRL's closure on this model, also where accelerate or `use_fast_head` wrapped it; None when
    there is none.
    """
    for forward in (getattr(model, "forward", None), getattr(model, "_original_forward", None)):
        function = getattr(forward, "__func__", forward)
        function = getattr(function, "trl_fused", function)
        if getattr(function, "__name__", "") and "fused_lm_head" in (
            getattr(function, "__kwdefaults__", None) or {}
        ):
            return function
    return None


def require_fused(model: Any) -> types.FunctionType:
    function = fused_function(model)
    if function is None:
        raise ValueError(
            "model: expected one with TRL's fused LM head (trl.trainer.utils.add_fused_lm_head, "
            "trl >= 1.16), "
            f"came {type(model).__name__} with trl {trl_version()}"
        )
    return function


def trl_version() -> str:
    import trl

    return trl.__version__
