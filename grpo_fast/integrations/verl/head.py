"""Our LM head for models that verl prepares with `use_fused_kernels=True`.

It supports verl >= 0.9 with `impl_backend` torch or liger.

    handle = use_fast_head()
    handle.undo()

In each forward pass, verl looks up its class `FusedLinearForPPO` in a module. `use_fast_head`
replaces this class for all models of the process.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from grpo_fast import linear_logps
from grpo_fast.integrations.fast_head import FastHead, compute_dtype

NAME = "FusedLinearForPPO"


class FastLinearForPPO(nn.Module):
    """Replacement for verl's `FusedLinearForPPO` with the same constructor and call.

    Args:
        chunk_size: Has no effect, because our kernels choose the size of their chunks.
        impl_backend: Has no effect.
    """

    def __init__(self, chunk_size: int = 512, impl_backend: str = "torch") -> None:
        super().__init__()

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


def use_fast_head() -> FastHead:
    """Replace verl's LM head with our kernels in all models of this process.

    Only models that verl prepared with `use_fused_kernels=True` are affected.

    Returns:
        A handle. Call its `undo()`, or use it in a `with` statement, to restore verl's head.
    """
    import verl.utils.experimental.torch_functional as home

    handle = FastHead()
    handle.callback(setattr, home, NAME, getattr(home, NAME))
    setattr(home, NAME, FastLinearForPPO)
    return handle
