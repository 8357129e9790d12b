"""Our LM head for models that verl prepares with `use_fused_kernels=True`.

It supports verl >= 0.9 with `impl_backend` torch or liger.

    handle = use_fast_head(model)  # after verl has patched the model's forward
    handle.undo()

In each forward pass, verl looks up its class `FusedLinearForPPO` in a module. `use_fast_head`
replaces this class only while the forward of one model runs. `use_fast_head_everywhere` replaces it
for all models of the process.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from grpo_fast import linear_logps
from grpo_fast.errors import require
from grpo_fast.integrations.fast_head import FastHead, compute_dtype

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NAME = "FusedLinearForPPO"
BACKENDS = "torch", "liger"
# Fields of a model's config that change the logits, each with the value that has no effect. verl's
# fused forward ignores these fields. A model with a different value is refused, because verl would
# compute wrong logits.
LEFT_OUT = {"final_logit_softcapping": None} | dict.fromkeys(
    ("logit_scale", "logits_scaling", "lm_head_multiplier"), 1.0
)


class FastLinearForPPO(nn.Module):
    """Replacement for verl's `FusedLinearForPPO` with the same constructor and call.

    Args:
        chunk_size: Has no effect, because our kernels choose the size of their chunks.
        impl_backend: "torch" or "liger". Our kernels are used in both cases.

    Raises:
        ValueError: `impl_backend` is neither "torch" nor "liger".
    """

    def __init__(self, chunk_size: int = 512, impl_backend: str = "torch") -> None:
        super().__init__()
        require(impl_backend in BACKENDS, "impl_backend", f"one of {BACKENDS}", repr(impl_backend))

    def forward(
        self,
        hidden_states: Tensor,  # (B, L, H) or (T, H)
        vocab_weights: Tensor,  # (V, H)
        input_ids: Tensor,  # (B, L) or (T,): the token that each row predicts
        temperature: float = 1.0,
    ) -> tuple[Tensor, Tensor]:
        """Compute the log-probability of each token and the entropy of each row.

        Args:
            hidden_states: Hidden states, shape (B, L, H) or (T, H).
            vocab_weights: Weight of the LM head, shape (V, H).
            input_ids: The token that each row predicts, shape (B, L) or (T,).
            temperature: Number by which the logits are divided.

        Returns:
            Log-probabilities and entropies in fp32, each with the shape of `input_ids`.
        """
        if isinstance(temperature, Tensor) and temperature.numel() == 1:
            temperature = temperature.item()
        dtype = compute_dtype(hidden_states)
        hidden = hidden_states.to(dtype)
        weight = vocab_weights.to(dtype)
        # Disable autocast. `hidden` and `weight` already have the dtype of the computation, and
        # autocast would cast fp32 tensors inside `linear_logps` to 16 bits.
        with torch.autocast(hidden.device.type, enabled=False):
            return linear_logps(
                hidden, weight, input_ids.long(), temperature=temperature, return_entropy=True
            )


@contextmanager
def _swapped() -> Iterator[None]:
    """Replace verl's class `FusedLinearForPPO` in a `with` block.

    The class is a module global, so this context manager is not thread-safe.
    """
    import verl.utils.experimental.torch_functional as home

    before = getattr(home, NAME)
    setattr(home, NAME, FastLinearForPPO)
    try:
        yield
    finally:
        setattr(home, NAME, before)


def use_fast_head(model: nn.Module) -> FastHead:
    """Replace verl's LM head of one model with our kernels.

    Args:
        model: A model whose forward verl's `use_fused_kernels` has patched.

    Returns:
        A handle. Call its `undo()`, or use it in a `with` statement, to restore verl's head.

    Raises:
        ValueError: verl has not patched the model, its backend is triton, or the head has a bias,
            softcap or scale, which verl's fused forward ignores.
    """
    _check(model)
    before = model.forward
    handle = FastHead()
    # Register the callbacks in reverse order, because `undo` runs the last one first. It must
    # delete our forward before it restores a forward that was set on the model object itself.
    if "forward" in vars(model):
        handle.callback(setattr, model, "forward", before)
    handle.callback(delattr, model, "forward")

    @functools.wraps(type(model).forward)
    def forward(self: nn.Module, *args: object, **kwargs: object) -> object:
        with _swapped():
            return before(*args, **kwargs)

    model.forward = types.MethodType(forward, model)
    return handle


def use_fast_head_everywhere() -> FastHead:
    """Replace verl's LM head with our kernels in all models of this process.

    Only models that verl prepared with `use_fused_kernels=True` are affected.

    Returns:
        A handle whose `undo()` restores verl's head.
    """
    handle = FastHead()
    handle.enter_context(_swapped())
    return handle


def _check(model: PreTrainedModel) -> None:
    """Raise a ValueError if verl's fused forward would compute wrong logits for this model."""
    backend = getattr(model, "_verl_fused_kernels_backend", None)
    expected = "one that verl prepared with use_fused_kernels=True and its impl_backend in "
    require(backend in BACKENDS, "model", f"{expected}{BACKENDS}", f"backend {backend!r}")
    values = ((name, getattr(model.config, name, None)) for name in LEFT_OUT)
    lost = [f"{n} = {x}" for n, x in values if x is not None and x != LEFT_OUT[n]]
    if getattr(model.lm_head, "bias", None) is not None:
        lost.insert(0, "the bias of lm_head")
    if lost:
        raise ValueError(
            f"model: verl's fused forward leaves out {lost[0]}; use_fused_kernels=False"
        )
