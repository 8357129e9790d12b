"""Per-token losses of a value function: squared error, clipped squared error, or Huber loss."""

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
    """Compute the loss of every value V for its return R.

    The loss depends on `kind`::

        plain      (V − R)²/2
        clipped    max((V − R)², (V_old + clamp(V − V_old, −epsilon, epsilon) − R)²)/2
        huber      (V − R)²/2 for |V − R| <= delta, otherwise delta·(|V − R| − delta/2)

    If the second term of "clipped" is the maximum, the gradient is 0, because the value has already
    moved by more than epsilon.

    Args:
        values: (R,), the values, which may require grad.
        old_values: (R,), values at sampling time.
        returns: (R,), the targets.
        kind: "clipped", "plain" or "huber".
        epsilon: clip range of "clipped".
        delta: threshold of "huber".

    Returns:
        The losses (R,), and a mask (R,) of the values whose clipped term is the maximum.
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
    """Return the explained variance 1 − Var(returns − values)/Var(returns), 0-d fp64.

    The result is 1 for a perfect critic, and 0 for a critic that returns a constant. It is NaN if
    all returns are equal.
    """
    if returns.numel() == 0:  # torch warns about the variance of an empty tensor
        return returns.new_full((), torch.nan, dtype=torch.float64)
    returns = returns.double()
    values = values.double()
    spread = returns.var(correction=0)
    unexplained = (returns - values).var(correction=0)
    return torch.where(spread > 0, 1 - unexplained / spread, torch.nan)
