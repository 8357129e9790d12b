"""The loss of a value function, per token: plain, clipped around the old values, or Huber's."""

from __future__ import annotations

import torch
from torch import Tensor

VALUE_LOSSES = ("clipped", "plain", "huber")


def value_losses(
    values: Tensor,  # (R,)
    old_values: Tensor,  # (R,)
    returns: Tensor,  # (R,)
    kind: str = "clipped",
    *,
    epsilon: float = 0.2,
    delta: float = 1.0,
) -> tuple[Tensor, Tensor]:  # (R,), (R,) bool
    """Loss of every value V for its return R, and where the clipped one counts.

    Equals, by `kind`::

        plain      (V − R)²/2
        clipped    max((V − R)², (V_old + clamp(V − V_old, −epsilon, epsilon) − R)²)/2
        huber      (V − R)²/2 up to |V − R| = delta, delta·(|V − R| − delta/2) beyond

    A clipped loss that counts has no gradient: the value has already moved far enough.
    """
    error = values - returns
    nowhere = torch.zeros_like(error, dtype=torch.bool)
    if kind == "huber":
        huber = torch.nn.functional.huber_loss
        return huber(values, returns, reduction="none", delta=delta), nowhere
    loss = error.square() / 2
    if kind == "plain":
        return loss, nowhere
    moved = values - old_values
    bounded = (old_values + moved.clamp(-epsilon, epsilon) - returns).square() / 2
    clipped = (moved.abs() > epsilon) & (bounded > loss)
    return torch.where(clipped, bounded, loss), clipped


def explained_variance(values: Tensor, returns: Tensor) -> Tensor:  # (R,) each → 0-d
    """1 − Var(returns − values)/Var(returns): 1 explains all, 0 no more than a constant does.

    NaN where the returns do not vary, or are none.
    """
    if returns.numel() == 0:  # torch warns of a variance over nothing
        return returns.new_full((), torch.nan, dtype=torch.float64)
    returns = returns.double()
    values = values.double()
    spread = returns.var(correction=0)
    left = (returns - values).var(correction=0)
    return torch.where(spread > 0, 1 - left / spread, torch.nan)
