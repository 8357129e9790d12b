"""PPO: per-token advantages by generalised advantage estimation, and losses of a critic."""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_fast.errors import kind_of, number, require


def gae(
    rewards: Tensor,  # (B, L)
    values: Tensor,  # (B, L)
    gamma: float = 1.0,
    lam: float = 0.95,
    *,
    mask: Tensor | None = None,  # (B, L)
) -> Tensor:  # (B, L)
    """Compute per-token advantages by generalised advantage estimation.

    Source: https://arxiv.org/abs/1506.02438

    A_t = Σ_k (γλ)^k (r_{t+k} + γ V_{t+k+1} - V_{t+k}), where V after the last token of a completion
    is 0. Tokens outside the mask are skipped, for example the output of a tool between two turns.
    In the formula, t+1 is then the next token inside the mask. The sum over k is computed in fp64,
    in log2(L) steps, each of which doubles the number of summed terms. If all values are 0 and lam
    is 1, the result is the discounted return.

    Args:
        rewards: (B, L), float. Reward of each token.
        values: (B, L), float. Value of the state before each token.
        gamma: discount factor in [0, 1].
        lam: trace decay in [0, 1].
        mask: (B, L), 1 for tokens that count. None: all tokens count.

    Returns:
        Advantages, (B, L), fp32. They are 0 outside the mask.

    Raises:
        ValueError: shapes differ, or gamma or lam is outside [0, 1].

    Example:
        >>> import torch
        >>> from grpo_fast.objective.ppo import gae
        >>> gae(torch.tensor([[0.0, 0.0, 1.0]]), torch.zeros(1, 3), lam=1.0)
        tensor([[1., 1., 1.]])
    """
    # 1. Check shapes and ranges.
    fits = isinstance(rewards, Tensor) and rewards.dim() == 2
    require(fits, "rewards", "a tensor of shape (B, L)", kind_of(rewards))
    for name, x in (("values", values), ("mask", rewards if mask is None else mask)):
        fits = isinstance(x, Tensor) and x.shape == rewards.shape
        require(fits, name, f"the shape of rewards, (B, L) = {tuple(rewards.shape)}", kind_of(x))
    count, length = rewards.shape
    number("gamma", gamma, "a number in [0, 1]", lambda x: 0 <= x <= 1)
    number("lam", lam, "a number in [0, 1]", lambda x: 0 <= x <= 1)
    # 2. Move the tokens inside the mask to the front of each completion. For each of these tokens,
    # find the value of the next token.
    active = torch.ones_like(rewards, dtype=torch.bool) if mask is None else mask.bool()
    order = (~active).to(torch.uint8).argsort(dim=1, stable=True)
    r, v = (torch.where(active, x.double(), 0.0).gather(1, order) for x in (rewards, values))
    after = torch.cat([v[:, 1:], v.new_zeros(count, 1)], dim=1)
    # 3. Sum the discounted temporal-difference errors. Each step of the loop doubles the number of
    # terms in the sums. Then undo step 2: scatter the sums to the original positions of the tokens.
    advantages = r + gamma * after - v
    span = 1
    decay = gamma * lam
    while span < length:  # invariant: A_t holds the terms k < span, and decay = (γλ)^span
        later = torch.nn.functional.pad(advantages[:, span:], (0, span))
        advantages = advantages + decay * later
        span = 2 * span
        decay = decay * decay
    return torch.zeros_like(advantages).scatter(1, order, advantages).float()


# ------------------------------------------------------------------------------------------- Critic
VALUE_LOSSES = ("clipped", "plain", "huber")


def value_losses(
    values: Tensor,  # (R,)
    old_values: Tensor,  # (R,)
    returns: Tensor,  # (R,)
    kind: str = "clipped",
    *,
    epsilon: float = 0.2,
) -> tuple[Tensor, Tensor]:  # (R,), (R,) bool
    """Compute the loss of every value V for its return R.

    The loss depends on `kind`::

        plain      (V − R)²/2
        clipped    max((V − R)², (V_old + clamp(V − V_old, −epsilon, epsilon) − R)²)/2
        huber      (V − R)²/2 for |V − R| <= 1, otherwise |V − R| − 1/2

    If the second term of "clipped" is the maximum, the gradient is 0, because the value has already
    moved by more than epsilon.

    Args:
        values: (R,), the values, which may require grad.
        old_values: (R,), values at sampling time.
        returns: (R,), the targets.
        kind: "clipped", "plain" or "huber".
        epsilon: clip range of "clipped".

    Returns:
        The losses (R,), and a mask (R,) of the values whose clipped term is the maximum.
    """
    error = values - returns
    nowhere = torch.zeros_like(error, dtype=torch.bool)
    if kind == "huber":
        return torch.nn.functional.huber_loss(values, returns, reduction="none"), nowhere
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
