"""Group-relative advantages: one small function per mode, over rewards laid out group by group."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from grpo_fast.objective.config import choice, number

# Every function takes (N, G) fp64 rewards in which NaN marks a completion without a verdict, and
# leaves it out: of the mean, the deviation, the count. What it returns at a NaN does not matter.


def count(r: Tensor) -> Tensor:
    """(N, 1) completions of each group that have a verdict."""
    return (~r.isnan()).sum(-1, keepdim=True)


def highest(r: Tensor) -> Tensor:
    """(N, 1) the group's maximum."""
    return r.nan_to_num(nan=-torch.inf).amax(-1, keepdim=True)


def rewards_as_they_are(r: Tensor) -> Tensor:
    """A = r."""
    return r


def baseline(r: Tensor, *, value: float = 0.0) -> Tensor:
    """A = r - value, a number that no reward of the batch had a part in (REINFORCE, Williams
    1992).
    """
    return r - value


def centered(r: Tensor) -> Tensor:
    """A = r - mean (Dr. GRPO)."""
    return r - r.nanmean(-1, keepdim=True)


def normalized(r: Tensor, *, eps: float = 1e-4, unbiased: bool = True) -> Tensor:
    """A = (r - mean) / (std + eps) (DeepSeekMath)."""
    a = centered(r)
    variance = a.square().nansum(-1, keepdim=True) / (count(r) - int(unbiased)).clamp(min=1)
    return a / (variance.sqrt() + eps)


def maximum(r: Tensor) -> Tensor:
    """A = r - mean at the group's maximum, 0 elsewhere (CS336, the lecture's text)."""
    return torch.where(r == highest(r), centered(r), 0.0)


def maximum_reward(r: Tensor) -> Tensor:
    """A = r at the group's maximum, 0 elsewhere (CS336, the lecture's code)."""
    return torch.where(r == highest(r), r, 0.0)


def batch(r: Tensor, *, eps: float = 1e-4, unbiased: bool = True) -> Tensor:
    """A = (r - group mean) / (std of the whole batch + eps) (TRL's scale_rewards="batch")."""
    known = r[~r.isnan()]
    return centered(r) / (known.std(correction=int(unbiased and known.numel() > 1)) + eps)


def rloo(r: Tensor) -> Tensor:
    """A = r - mean of the other completions of the group (2402.14740)."""
    return centered(r) * (count(r) / (count(r) - 1).clamp(min=1))


def reinforce_pp_baseline(r: Tensor, *, eps: float = 1e-8) -> Tensor:
    """A = whiten(r - group mean) over the whole batch (2501.03262)."""
    a = centered(r)
    return whitened(a, ~a.isnan(), eps)


def opo(r: Tensor, *, lengths: Tensor) -> Tensor:
    """A = r - Σ l·r / Σ l: the optimal, length-weighted baseline (2505.23585). lengths: (N*G,)
    tokens.
    """
    weight = torch.where(r.isnan(), 0.0, lengths.to(r).reshape(r.shape))
    return r - (weight * r).nansum(-1, keepdim=True) / weight.sum(-1, keepdim=True).clamp(min=1e-9)


def passk(r: Tensor) -> Tensor:
    """A = best - second best for the group's best completion, 0 elsewhere (the k = G case of
    2503.19595).
    """
    top = r.nan_to_num(nan=-torch.inf).topk(min(2, r.shape[-1]), dim=-1)
    gap = torch.where(count(r) > 1, top.values[:, :1] - top.values[:, -1:], 0.0)
    return torch.zeros_like(r).scatter(-1, top.indices[:, :1], gap)


MODES: dict[str, Callable[..., Tensor]] = {
    "rewards": rewards_as_they_are,
    "baseline": baseline,
    "centered": centered,
    "normalized": normalized,
    "max": maximum,
    "max_code": maximum_reward,
    "batch": batch,
    "rloo": rloo,
    "reinforce_pp_baseline": reinforce_pp_baseline,
    "opo": opo,
    "passk": passk,
}


# Modes in which a group is not its own baseline: it may be of one, and of equal rewards.
WITHOUT_GROUPS = ("rewards", "baseline")
# Modes whose advantages sum to 0 over a step; those of opo, weighed by the completions' lengths.
CENTERED = ("centered", "normalized", "batch", "rloo", "reinforce_pp_baseline", "opo")


def group_advantages(
    rewards: Tensor,  # (N*G,)
    mode: str = "normalized",
    *,
    group_size: int,
    **options: object,
) -> Tensor:  # (N*G,)
    """Advantages of N groups of G completions each, laid out group by group.

    A group whose rewards are all equal gets exactly 0 (modes "rewards" and "baseline" know no
    groups, and the whitening of "reinforce_pp_baseline" still moves nothing there). A reward that
    is NaN marks a completion without a verdict: it is left out of its group's baseline and gets
    advantage 0.

    Args:
        rewards: (N*G,) float.
        mode: a name of `MODES`: "rewards", "baseline", "centered", "normalized", "max", "max_code",
            "batch", "rloo", "reinforce_pp_baseline", "opo", "passk".
        group_size: G; must divide the number of rewards. 1 is for modes "rewards" and "baseline":
            the others find a group of equal rewards in it.
        options: keywords of that mode's function (`value`, `eps`, `unbiased`, `lengths`).

    Returns:
        (N*G,) fp32 advantages.

    Raises:
        ValueError: unknown mode or option, wrong shape, groups of one (see there), infinite
            rewards.
    """
    choice("mode", mode, MODES)
    if not isinstance(rewards, Tensor) or rewards.dim() != 1:
        raise ValueError(f"rewards: expected a tensor of shape (N*G,), got {_kind(rewards)}")
    if isinstance(group_size, bool) or not isinstance(group_size, int) or group_size < 1:
        raise ValueError(f"group_size: expected an integer >= 1, got {group_size!r}")
    if rewards.numel() % group_size:
        raise ValueError(
            f"group_size: expected a divisor of {rewards.numel()} rewards, got {group_size}"
        )
    if rewards.is_complex() or torch.isinf(rewards).any():
        raise ValueError(
            "rewards: expected finite values (or NaN for a completion without a verdict), got "
            f"{rewards.dtype if rewards.is_complex() else 'inf'}"
        )
    check_group_size(mode, group_size)
    check_options(mode, options)
    if mode == "opo":
        lengths = options.get("lengths")
        if not isinstance(lengths, Tensor) or lengths.shape != rewards.shape:
            expected = f"a tensor (N*G,) = {tuple(rewards.shape)} of completion lengths"
            raise ValueError(f"lengths: mode 'opo' expects {expected}, got {_kind(lengths)}")
        if not ((lengths >= 0) & torch.isfinite(lengths)).all():
            raise ValueError("lengths: mode 'opo' expects finite numbers >= 0, got others")
    function = MODES[mode]
    grouped = rewards.double().reshape(-1, group_size)
    if grouped.isnan().all():  # also of none: torch warns of a deviation over nothing
        return torch.zeros_like(rewards, dtype=torch.float32)
    advantages = function(grouped, **options)
    if mode not in WITHOUT_GROUPS:
        lowest = grouped.nan_to_num(nan=torch.inf).amin(-1, keepdim=True)
        advantages = torch.where(lowest == highest(grouped), 0.0, advantages)
    advantages = torch.where(grouped.isnan(), 0.0, advantages).reshape(-1).float()
    if not torch.isfinite(advantages).all():
        largest = f"{grouped.nan_to_num().abs().max().item():g}"
        raise ValueError(f"rewards: expected advantages within fp32, got rewards up to {largest}")
    return advantages


def check_group_size(mode: str, group_size: int) -> None:
    """Raise a ValueError where each group is its own baseline, so that nothing could be learnt."""
    if group_size == 1 and mode not in WITHOUT_GROUPS:
        why = "all advantages would be 0"
        raise ValueError(f"group_size: mode {mode!r} expects at least 2, got 1: {why}")


def check_options(mode: str, options: Mapping[str, object]) -> None:
    """A ValueError for an option that `mode` does not know, or a value that it cannot take."""
    known = set(MODES[mode].__kwdefaults__ or {}) | ({"lengths"} if mode == "opo" else set())
    for name, value in options.items():
        if name not in known:
            raise ValueError(f"{name}: mode {mode!r} expects one of {sorted(known)}, got {name!r}")
        if name == "eps":
            number("eps", value, "a finite number >= 0", lambda x: x >= 0)
        if name == "value":
            number("value", value, "a finite number", lambda x: True)
        if name == "unbiased" and not isinstance(value, bool):
            raise ValueError(f"unbiased: expected True or False, got {value!r}")


def _kind(x: object) -> str:
    return f"shape {tuple(x.shape)}" if isinstance(x, Tensor) else repr(x)


def whitened(a: Tensor, known: Tensor, eps: float = 1e-8) -> Tensor:
    """`a` with mean 0 and deviation 1 over its `known` entries (a mask of the same shape)."""
    counted = a[known]
    return (a - counted.mean()) / (counted.std(correction=0) + eps)


def gae(
    rewards: Tensor,  # (B, L)
    values: Tensor,  # (B, L)
    gamma: float = 1.0,
    lam: float = 0.95,
    *,
    mask: Tensor | None = None,  # (B, L)
    following: Tensor | None = None,  # (B,)
) -> Tensor:  # (B, L)
    """Generalised advantage estimation for per-token advantages (1506.02438).

    A_t = Σ_k (γλ)^k (r_{t+k} + γ V_{t+k+1} - V_{t+k}), with V = `following` after the completion's
    last token. The sum over k takes log2(L) doublings over whole tensors, in fp64.

    Args:
        rewards, values: (B, L) per token.
        gamma, lam: discount and trace decay, in [0, 1].
        mask: (B, L), 1 where a token counts; padding must be at the end.
        following: (B,), the value of the state after each completion's last token; None: 0, as
            after a completion that has ended.

    Raises:
        ValueError: shapes that differ; gamma or lam outside [0, 1].
    """
    if not isinstance(rewards, Tensor) or rewards.dim() != 2:
        raise ValueError(f"rewards: expected a tensor of shape (B, L), got {_kind(rewards)}")
    for name, x in (("values", values), ("mask", rewards if mask is None else mask)):
        if not isinstance(x, Tensor) or x.shape != rewards.shape:
            raise ValueError(
                f"{name}: expected the shape of rewards, (B, L) = {tuple(rewards.shape)}, got "
                f"{_kind(x)}"
            )
    count, length = rewards.shape
    if following is not None and not (
        isinstance(following, Tensor) and following.shape == (count,)
    ):
        raise ValueError(f"following: expected shape (B,) = ({count},), got {_kind(following)}")
    for name, value in (("gamma", gamma), ("lam", lam)):
        number(name, value, "a number in [0, 1]", lambda x: 0 <= x <= 1)
    active = torch.ones_like(rewards, dtype=torch.bool) if mask is None else mask.bool()
    r, v = (torch.where(active, x.double(), 0.0) for x in (rewards, values))
    after = torch.cat([v[:, 1:], v.new_zeros(count, 1)], dim=1)
    if following is not None and length:
        last = active & ~torch.cat([active[:, 1:], active.new_zeros(count, 1)], dim=1)
        after = torch.where(last, following.double()[:, None], after)
    advantages = r + gamma * after - v
    reach, decay = 1, gamma * lam  # A_t so far holds the terms k < reach; decay = (γλ)^reach
    while reach < length:
        later = torch.nn.functional.pad(advantages[:, reach:], (0, reach))
        advantages, reach, decay = advantages + decay * later, 2 * reach, decay * decay
    return advantages.float()


def process_advantages(
    rewards: Tensor,  # (N*G, L)
    *,
    group_size: int,
    eps: float = 1e-4,
) -> Tensor:  # (N*G, L)
    """Advantages per token of groups whose rewards are per token, without a critic.

    Process supervision of DeepSeekMath (2402.03300, 4.1.3): every reward of a group, wherever it
    stands, is normalised by the mean and the deviation of all of them, and the advantage of a token
    is the sum of those that stand at it and behind it.

    Args:
        rewards: (N*G, L) group by group; NaN where a token has no reward of its own, as at the
            padding. A completion of NaNs gets advantage 0.
        group_size: G; must divide the number of completions.

    Raises:
        ValueError: another shape, infinite rewards, a group_size that is no divisor.
    """
    if not isinstance(rewards, Tensor) or rewards.dim() != 2 or rewards.isinf().any():
        raise ValueError(f"rewards: expected finite ones of shape (N*G, L), got {_kind(rewards)}")
    if not group_size >= 1 or len(rewards) % group_size:
        raise ValueError(
            f"group_size: expected a divisor of {len(rewards)} completions, got {group_size}"
        )
    # One row for all rewards of a group: the mean of the group's, not the mean of means.
    grouped = rewards.double().reshape(len(rewards) // group_size, -1)
    steps = normalized(grouped, eps=eps).reshape(rewards.shape).nan_to_num()
    return steps.flip(-1).cumsum(-1).flip(-1).float()
