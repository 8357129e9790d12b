"""Our LM head for models that verl prepares with `use_fused_kernels=True`.

It supports verl >= 0.9 with `impl_backend` torch or liger.

    handle = use_fast_head()
    handle.undo()

In each forward pass, verl looks up its class `FusedLinearForPPO` in a module. `use_fast_head`
replaces this class for all models of the process.

verl's fused forward ignores a bias, a softcap and a scale of the head. The forward pass of a model
with such a head raises an error. It also raises an error with verl's backend triton, which does not
use the class.
"""

from __future__ import annotations

import sys
from typing import NoReturn

import torch
from torch import Tensor, nn

from grpo_fast import linear_logps
from grpo_fast.errors import require
from grpo_fast.integrations.fast_head import FastHead, compute_dtype

# Fields of a model's config that change the logits, each with the value that has no effect.
LEFT_OUT = {"final_logit_softcapping": None} | dict.fromkeys(
    ("logit_scale", "logits_scaling", "lm_head_multiplier"), 1.0
)


class FastLinearForPPO(nn.Module):
    """Replacement for verl's `FusedLinearForPPO` with the same constructor and call.

    Args:
        chunk_size: Has no effect, because our kernels choose the size of their chunks.
        impl_backend: Has no effect.

    Raises:
        ValueError: a model's forward calls the constructor, and verl ignores a part of its head.
    """

    def __init__(self, chunk_size: int = 512, impl_backend: str = "torch") -> None:
        super().__init__()
        # verl's patched forward creates this module without passing its model, so read the model
        # from the frame of the caller.
        check_head(sys._getframe(1).f_locals.get("self"))

    def forward(
        self,
        hidden_states: Tensor,  # (B, L, H) or (T, H)
        vocab_weights: Tensor,  # (V, H)
        input_ids: Tensor,  # (B, L) or (T,): the token that each row predicts
        temperature: float | Tensor = 1.0,
    ) -> tuple[Tensor, Tensor]:
        """Compute the log-probability of each token and the entropy of each row.

        Args:
            hidden_states: Hidden states, shape (B, L, H) or (T, H).
            vocab_weights: Weight of the LM head, shape (V, H).
            input_ids: The token that each row predicts, shape (B, L) or (T,).
            temperature: Number by which the logits are divided, or a tensor of equal numbers.

        Returns:
            Log-probabilities and entropies in fp32, each with the shape of `input_ids`.
        """
        if isinstance(temperature, Tensor):
            temperature = one_temperature(temperature, tuple(input_ids.shape))
        dtype = compute_dtype(hidden_states)
        hidden = hidden_states.to(dtype)
        weight = vocab_weights.to(dtype)
        # Disable autocast. `hidden` and `weight` already have the dtype of the computation, and
        # autocast would cast fp32 tensors inside `linear_logps` to 16 bits.
        with torch.autocast(hidden.device.type, enabled=False):
            return linear_logps(
                hidden, weight, input_ids.long(), temperature=temperature, return_entropy=True
            )


def one_temperature(temperature: Tensor, shape: tuple[int, ...]) -> float:
    """Return the number in a tensor of equal temperatures.

    Args:
        temperature: One number, or one number for each row.
        shape: The shape of `input_ids`.
    """
    has_numbers = temperature.numel() > 0 and temperature.is_floating_point()
    has_shape = temperature.numel() == 1 or tuple(temperature.shape) == shape
    expected = f"one floating-point number, or a tensor of them with the shape {shape} of input_ids"
    came = f"shape {tuple(temperature.shape)} in {temperature.dtype}"
    require(has_numbers and has_shape, "temperature", expected, came)
    is_constant = not (temperature.requires_grad and torch.is_grad_enabled())
    came = "one that requires grad; pass temperature.detach()"
    require(is_constant, "temperature", "a tensor without a gradient", came)
    expected = "one temperature for all rows (sample the whole batch with one)"
    low, high = torch.stack(temperature.aminmax()).tolist()  # waits for the GPU once
    require(low == high, "temperature", expected, f"numbers from {low!r} to {high!r}")
    return float(low)


def check_head(model: object) -> None:
    """Raise a ValueError if verl's fused forward would compute wrong logits for a model."""
    config, lm_head = (getattr(model, name, None) for name in ("config", "lm_head"))
    values = {name: getattr(config, name, None) for name in LEFT_OUT}
    lost = [f"{n} = {x}" for n, x in values.items() if x is not None and x != LEFT_OUT[n]]
    lost += ["the bias of lm_head"] * (getattr(lm_head, "bias", None) is not None)
    if lost:
        raise ValueError(
            f"model: verl's fused forward leaves out {lost[0]}; set use_fused_kernels=False"
        )


def refuse_triton(*args: object, **kwargs: object) -> NoReturn:
    raise ValueError("impl_backend: expected 'torch' or 'liger' with our head, got 'triton'")


def use_fast_head() -> FastHead:
    """Replace verl's LM head with our kernels in all models of this process.

    Only models that verl prepared with `use_fused_kernels=True` are affected.

    Returns:
        A handle. Call its `undo()`, or use it in a `with` statement, to restore verl's head.
    """
    import verl.utils.experimental.torch_functional as functional
    import verl.utils.kernel.linear_cross_entropy as of_triton

    handle = FastHead()
    for home, name, ours in (
        (functional, "FusedLinearForPPO", FastLinearForPPO),
        (of_triton, "linear_cross_entropy", refuse_triton),
    ):
        handle.callback(setattr, home, name, getattr(home, name))
        setattr(home, name, ours)
    return handle
