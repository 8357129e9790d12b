"""Advantages of single tokens, from rewards and values of a critic."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from grpo_fast.errors import kind_of, number, require
from grpo_fast.objective.advantages import normalized


def gae(
    rewards: Tensor,  # (B, L)
    values: Tensor,  # (B, L)
    gamma: float = 1.0,
    lam: float | Tensor = 0.95,
    *,
    mask: Tensor | None = None,  # (B, L)
    following: Tensor | None = None,  # (B,)
) -> Tensor:  # (B, L)
    """Generalised advantage estimation for per-token advantages (1506.02438).

    A_t = Σ_k (γλ)^k (r_{t+k} + γ V_{t+k+1} - V_{t+k}), with V = `following` after the completion's
    last token. A step leads from one token that counts to the next: a gap of the mask between them
    (what a tool wrote) is skipped. The sum over k takes log2(L) doublings over whole tensors, in
    fp64. With values of 0 and lam = 1 these are discounted returns.

    Args:
        rewards, values: (B, L) per token; where the mask is 0 they do not count.
        gamma, lam: discount and trace decay, in [0, 1]; lam may be (B,), one per completion.
        mask: (B, L), 1 where a token counts.
        following: (B,), the value of the state after each completion's last token; None: 0, as
            after a completion that has ended.

    Raises:
        ValueError: shapes that differ; gamma or lam outside [0, 1].
    """
    # 1. Check shapes and ranges.
    fits = isinstance(rewards, Tensor) and rewards.dim() == 2
    require(fits, "rewards", "a tensor of shape (B, L)", kind_of(rewards))
    for name, x in (("values", values), ("mask", rewards if mask is None else mask)):
        fits = isinstance(x, Tensor) and x.shape == rewards.shape
        require(fits, name, f"the shape of rewards, (B, L) = {tuple(rewards.shape)}", kind_of(x))
    count, length = rewards.shape
    fits = following is None or getattr(following, "shape", None) == (count,)
    require(fits, "following", f"shape (B,) = ({count},)", kind_of(following))
    number("gamma", gamma, "a number in [0, 1]", lambda x: 0 <= x <= 1)
    if isinstance(lam, Tensor):
        fits = lam.shape == (count,) and bool(((lam >= 0) & (lam <= 1)).all())
        require(fits, "lam", f"(B,) = ({count},) numbers in [0, 1]", kind_of(lam))
        decay: Any = gamma * lam.double()[:, None]
    else:
        number("lam", lam, "a number in [0, 1]", lambda x: 0 <= x <= 1)
        decay = gamma * lam
    # 2. Put the tokens that count side by side, and find the value after each.
    active = torch.ones_like(rewards, dtype=torch.bool) if mask is None else mask.bool()
    order = (~active).to(torch.uint8).argsort(dim=1, stable=True)  # those that count, side by side
    r, v = (torch.where(active, x.double(), 0.0).gather(1, order) for x in (rewards, values))
    after = torch.cat([v[:, 1:], v.new_zeros(count, 1)], dim=1)
    if following is not None and length:
        last = torch.arange(length, device=r.device) == active.sum(1, keepdim=True) - 1
        after = torch.where(last, following.double()[:, None], after)
    # 3. Sum the discounted errors in doublings, and put them back in their places.
    advantages = r + gamma * after - v
    reach = 1
    while reach < length:  # A_t so far holds the terms k < reach; decay = (γλ)^reach
        later = torch.nn.functional.pad(advantages[:, reach:], (0, reach))
        advantages = advantages + decay * later
        reach = 2 * reach
        decay = decay * decay
    return torch.zeros_like(advantages).scatter(1, order, advantages).float()


def lam_by_length(lengths: Tensor, alpha: float) -> Tensor:  # (B,) each
    """λ = 1 - 1/(alpha·length): a reward reaches long completions' start (VAPO, 2504.05118)."""
    return (1.0 - 1.0 / (alpha * lengths.double()).clamp(min=1.0)).clamp(0.0, 1.0)


def process_advantages(
    rewards: Tensor,  # (N*G, L)
    *,
    group_size: int,
    eps: float = 1e-4,
) -> Tensor:  # (N*G, L)
    """Advantages per token of groups whose rewards are per token, without a critic.

    Process supervision of DeepSeekMath (2402.03300, 4.1.3): every reward is normalised by the mean
    and deviation of all of its group, and a token's advantage is the sum of those at and behind it.

    Args:
        rewards: (N*G, L) group by group; NaN where a token has no reward of its own, as at the
            padding. A completion of NaNs gets advantage 0.
        group_size: G; must divide the number of completions.

    Raises:
        ValueError: another shape, infinite rewards, a group_size that is no divisor.
    """
    fits = isinstance(rewards, Tensor) and rewards.dim() == 2 and not rewards.isinf().any()
    require(fits, "rewards", "finite ones of shape (N*G, L)", kind_of(rewards))
    fits = group_size >= 1 and len(rewards) % group_size == 0
    require(fits, "group_size", f"a divisor of {len(rewards)} completions", group_size)
    # One row for all rewards of a group: the mean of the group's, not the mean of means.
    grouped = rewards.double().reshape(len(rewards) // group_size, -1)
    steps = normalized(grouped, eps=eps).reshape(rewards.shape).nan_to_num()
    return steps.flip(-1).cumsum(-1).flip(-1).float()
