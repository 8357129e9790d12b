"""The LM head of verl's `use_fused_kernels` (>= 0.9; impl_backend torch or liger) on our kernels.

    handle = use_fast_head(model)  # after verl patched its forward; or: with use_fast_head(model):
    handle.undo()

verl's fused forwards look `FusedLinearForPPO` up at each call; ours stands there while one model's
forward runs, or for the process (`use_fast_head_everywhere`).
"""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from grpo_fast import linear_logps
from grpo_fast.errors import require
from grpo_fast.integrations.fast_head import FastHead, compute_dtype

NAME = "FusedLinearForPPO"
BACKENDS = "torch", "liger"
# Head rules that verl's fused forwards leave out: they would be dropped without a word.
LEFT_OUT = {"final_logit_softcapping": None} | dict.fromkeys(
    ("logit_scale", "logits_scaling", "lm_head_multiplier"), 1.0
)


class FastLinearForPPO(nn.Module):
    """verl's `FusedLinearForPPO`: the same constructor and call; the entropy is fp32."""

    def __init__(self, chunk_size: int = 512, impl_backend: str = "torch") -> None:
        super().__init__()
        require(impl_backend in BACKENDS, "impl_backend", f"one of {BACKENDS}", repr(impl_backend))
        # Neither changes a number: we choose the chunks.
        self.chunk_size, self.impl_backend = chunk_size, impl_backend

    def forward(
        self,
        hidden_states: Tensor,  # (B, L, H) or (T, H)
        vocab_weights: Tensor,  # (V, H)
        input_ids: Tensor,  # (B, L) or (T,): the token that each row predicts
        temperature: float = 1.0,
    ) -> tuple[Tensor, Tensor]:
        """(log_probs, entropy) of the logits / temperature, fp32, in the layout of input_ids."""
        if isinstance(temperature, Tensor) and temperature.numel() == 1:
            temperature = temperature.item()
        dtype = compute_dtype(hidden_states)
        hidden, weight = hidden_states.to(dtype), vocab_weights.to(dtype)
        # Autocast is off: the operands have their dtype, and sums stay fp32.
        with torch.autocast(hidden.device.type, enabled=False):
            return linear_logps(
                hidden, weight, input_ids.long(), temperature=temperature, return_entropy=True
            )


# A global of verl's module: forwards in two threads at once would see each other's.
@contextmanager
def _swapped() -> Iterator[None]:
    import verl.utils.experimental.torch_functional as home

    before = getattr(home, NAME)
    setattr(home, NAME, FastLinearForPPO)
    try:
        yield
    finally:
        setattr(home, NAME, before)


def use_fast_head(model: nn.Module) -> FastHead:
    """Let our kernels compute the head of this model, prepared by verl's `use_fused_kernels`.

    Raises ValueError for one that is not, for the triton backend, and for a head with a rule (bias,
    softcap, scale) that verl's fused forward leaves out.
    """
    _check(model)
    before, handle = model.forward, FastHead()
    # Run in reverse: our forward goes, then the one that stood on the model itself comes back.
    if "forward" in vars(model):
        handle.callback(setattr, model, "forward", before)
    handle.callback(delattr, model, "forward")

    @functools.wraps(type(model).forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _swapped():
            return before(*args, **kwargs)

    model.forward = types.MethodType(forward, model)
    return handle


def use_fast_head_everywhere() -> FastHead:
    """`use_fast_head` for every model of this process under verl's `use_fused_kernels`."""
    handle = FastHead()
    handle.enter_context(_swapped())
    return handle


def _check(model: Any) -> None:
    backend = getattr(model, "_verl_fused_kernels_backend", None)
    expected = "one that verl prepared with use_fused_kernels=True and its impl_backend in "
    require(backend in BACKENDS, "model", f"{expected}{BACKENDS}", f"backend {backend!r}")
    values = ((name, getattr(model.config, name, None)) for name in LEFT_OUT)
    lost = [f"{n} = {x}" for n, x in values if x is not None and x != LEFT_OUT[n]]
    if getattr(model.lm_head, "bias", None) is not None:
        lost.insert(0, "the bias of lm_head")
    if lost:
        advice = "use_fused_kernels=False"
        raise ValueError(f"model: verl's fused forward leaves out {lost[0]}; {advice}")
