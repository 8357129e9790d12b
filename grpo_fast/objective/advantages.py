"""Group-relative advantages: one small function per mode, over rewards laid out group by group."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from grpo_fast.errors import argument_error, choice, kind_of, number, require

# Every function takes (N, G) fp64 rewards in which NaN marks a completion without a verdict, and
# leaves it out: of the mean, the deviation, the count. What it returns at a NaN does not matter.


def count(r: Tensor) -> Tensor:
    """(N, 1) completions of each group that have a verdict."""
    return (~r.isnan()).sum(-1, keepdim=True)


def highest(r: Tensor) -> Tensor:
    """(N, 1) the group's maximum."""
    return r.nan_to_num(nan=-torch.inf).amax(-1, keepdim=True)


def whitened(a: Tensor, known: Tensor, eps: float = 1e-8) -> Tensor:
    """`a` with mean 0 and deviation 1 over its `known` entries (a mask of the same shape)."""
    counted = a[known]
    return (a - counted.mean()) / (counted.std(correction=0) + eps)


def raw_rewards(r: Tensor) -> Tensor:
    """A = r."""
    return r


def baseline(r: Tensor, *, value: float = 0.0) -> Tensor:
    """A = r - value, a number that the batch had no part in (REINFORCE, Williams 1992)."""
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


def rloo_normalized(r: Tensor, *, eps: float = 1e-6) -> Tensor:
    """A = (r - mean of the others) / (their deviation + eps), undivided where that is 0 (NeMo)."""
    own = torch.eye(r.shape[-1], dtype=torch.bool, device=r.device)
    others = torch.where(own, torch.nan, r[:, None, :])  # (N, G, G)
    a = r - others.nanmean(-1)
    left = others - others.nanmean(-1, keepdim=True)
    known = (~others.isnan()).sum(-1)
    std = (left.square().nansum(-1) / (known - 1).clamp(min=1)).sqrt()
    is_one = others.nan_to_num(torch.inf).amin(-1) == others.nan_to_num(-torch.inf).amax(-1)
    return a / torch.where(is_one | (known < 2), 1.0, std + eps)


def maxrl(r: Tensor, *, eps: float = 1e-6) -> Tensor:
    """A = (r - mean) / (mean + eps), of rewards >= 0 (MaxRL)."""
    least = r.nan_to_num(nan=torch.inf).min().item()
    require(least >= 0, "rewards", "numbers >= 0 of mode 'maxrl'", f"{least:g}")
    return centered(r) / (r.nanmean(-1, keepdim=True) + eps)


def gdpo(
    r: Tensor,  # (K, N, G)
    *,
    weights: Sequence[float] = (),
    each: str = "normalized",
    eps: float = 1e-4,
) -> Tensor:  # (N, G)
    """A = Σ_k w_k·A_k over K rewards, whitened over the batch; A_k by mode `each` (2601.05242).

    A reward that is NaN is left out of its completion's sum, as in TRL.
    """
    share = r.new_tensor([*weights] or [1.0] * len(r))[:, None, None]
    a = (share * torch.stack([_zero_equal_groups(MODES[each](x), x) for x in r])).nansum(0)
    known = a[~r.isnan().all(0)]
    std = known.std(correction=int(known.numel() > 1))
    return torch.where(std > 0, (a - known.mean()) / (std + eps), 0.0)


def _zero_equal_groups(a: Tensor, r: Tensor) -> Tensor:
    """The advantages of (N, G) rewards, exactly 0 in groups whose rewards are all equal."""
    lowest = r.nan_to_num(nan=torch.inf).amin(-1, keepdim=True)
    return torch.where(lowest == highest(r), 0.0, a)


def reinforce_pp_baseline(r: Tensor, *, eps: float = 1e-8) -> Tensor:
    """A = whiten(r - group mean) over the whole batch (2501.03262)."""
    a = centered(r)
    return whitened(a, ~a.isnan(), eps)


def opo(r: Tensor, *, lengths: Tensor) -> Tensor:
    """A = r - Σ l·r / Σ l: the length-weighted baseline (2505.23585). lengths: (N*G,) tokens."""
    weight = torch.where(r.isnan(), 0.0, lengths.to(r).reshape(r.shape))
    return r - (weight * r).nansum(-1, keepdim=True) / weight.sum(-1, keepdim=True).clamp(min=1e-9)


def passk(r: Tensor) -> Tensor:
    """A = best - second best for the best, 0 elsewhere (k = G in 2503.19595)."""
    top = r.nan_to_num(nan=-torch.inf).topk(min(2, r.shape[-1]), dim=-1)
    gap = torch.where(count(r) > 1, top.values[:, :1] - top.values[:, -1:], 0.0)
    return torch.zeros_like(r).scatter(-1, top.indices[:, :1], gap)


MODES: dict[str, Callable[..., Tensor]] = {
    "rewards": raw_rewards,
    "baseline": baseline,
    "centered": centered,
    "normalized": normalized,
    "max": maximum,
    "max_code": maximum_reward,
    "batch": batch,
    "rloo": rloo,
    "rloo_normalized": rloo_normalized,
    "maxrl": maxrl,
    "gdpo": gdpo,
    "reinforce_pp_baseline": reinforce_pp_baseline,
    "opo": opo,
    "passk": passk,
}


NUMBERS: dict[str, tuple[str, Callable[[float], bool]]] = {  # options that are numbers
    "eps": ("a finite number >= 0", lambda x: x >= 0),
    "value": ("a finite number", lambda x: True),
    "clip_low": ("None or a number <= 0", lambda x: x <= 0),
    "clip_high": ("None or a number >= 0", lambda x: x >= 0),
}

# Modes in which a group is not its own baseline: it may be of one, and of equal rewards.
WITHOUT_GROUPS = ("rewards", "baseline")


def group_advantages(
    rewards: Tensor,  # (N*G,); (K, N*G) of mode "gdpo"
    mode: str = "normalized",
    *,
    group_size: int,
    clip_low: float | None = None,
    clip_high: float | None = None,
    **options: Any,
) -> Tensor:  # (N*G,)
    """Advantages of N groups of G completions each, laid out group by group.

    A group whose rewards are all equal gets exactly 0 (modes "rewards" and "baseline" know no
    groups, and the whitening of "reinforce_pp_baseline" still moves nothing there). A reward that
    is NaN marks a completion without a verdict: it is left out of its group's baseline and gets
    advantage 0. Of mode "gdpo" a completion without a verdict has NaN for all K rewards.

    Args:
        rewards: (N*G,) float; for mode "gdpo" K of them, (K, N*G).
        mode: a name of `MODES` (formulas: README.md beside this file).
        group_size: G; must divide the number of rewards. 1 is for modes "rewards" and "baseline":
            the others find a group of equal rewards in it.
        clip_low, clip_high: bounds of the advantages, <= 0 and >= 0; None: none.
        options: keywords of that mode's function (`value`, `eps`, `unbiased`, `lengths`; of "gdpo"
            `weights` of its rewards and `each`, the mode of one).

    Returns:
        (N*G,) fp32 advantages.

    Raises:
        ValueError: unknown mode or option, wrong shape, groups of one (see there), infinite
            rewards.
    """
    # 1. Check the shape, the group size, the values and the options of the mode.
    choice("mode", mode, MODES)
    dim, shape = (2, "(K, N*G), K rewards,") if mode == "gdpo" else (1, "(N*G,)")
    fits = isinstance(rewards, Tensor) and rewards.dim() == dim and 0 not in rewards.shape[:-1]
    require(fits, "rewards", f"a tensor of shape {shape}", kind_of(rewards))
    is_count = isinstance(group_size, int) and not isinstance(group_size, bool) and group_size >= 1
    require(is_count, "group_size", "an integer >= 1", repr(group_size))
    count = rewards.shape[-1]
    require(count % group_size == 0, "group_size", f"a divisor of {count} rewards", group_size)
    is_complex = rewards.is_complex()
    expected = "finite values (NaN: there is no verdict)"
    fits = not is_complex and not torch.isinf(rewards).any()
    require(fits, "rewards", expected, rewards.dtype if is_complex else "inf")
    check_group_size(mode, group_size)
    check_options(mode, {"clip_low": clip_low, "clip_high": clip_high, **options})
    weights = options.get("weights") or ()
    fits = mode != "gdpo" or len(weights) in (0, len(rewards))
    require(fits, "weights", f"{len(rewards)}, one for each reward", weights)
    if mode == "opo":
        lengths = options.get("lengths")
        if not isinstance(lengths, Tensor) or lengths.shape != rewards.shape:
            expected = f"a tensor of completion lengths (N*G,) = {tuple(rewards.shape)}"
            raise argument_error("lengths", expected, kind_of(lengths))
        fits = bool(((lengths >= 0) & torch.isfinite(lengths)).all())
        require(fits, "lengths", "finite numbers >= 0", "others")
    # 2. Compute in fp64, group by group.
    function = MODES[mode]
    grouped = rewards.double().reshape(*rewards.shape[:-1], -1, group_size)
    missing = grouped.isnan().all(0) if mode == "gdpo" else grouped.isnan()
    if missing.all():  # also of none: torch warns of a deviation over nothing
        return torch.zeros(count, device=rewards.device)
    advantages = function(grouped, **options)
    if mode not in (*WITHOUT_GROUPS, "gdpo"):
        advantages = _zero_equal_groups(advantages, grouped)
    # 3. Completions without a verdict get 0; bound the others, which must fit into fp32.
    advantages = torch.where(missing, 0.0, advantages).reshape(-1).float()
    if clip_low is not None or clip_high is not None:
        advantages = advantages.clamp(clip_low, clip_high)
    if not torch.isfinite(advantages).all():
        largest = f"{grouped.nan_to_num().abs().max().item():g}"
        raise argument_error("rewards", "advantages within fp32", f"rewards up to {largest}")
    return advantages


def check_group_size(mode: str, group_size: int) -> None:
    """Raise a ValueError where each group is its own baseline, so that nothing could be learnt."""
    fits = group_size > 1 or mode in WITHOUT_GROUPS
    expected = f"at least 2 of mode {mode!r}"
    require(fits, "group_size", expected, "1: all advantages would be 0")


def check_options(mode: str, options: Mapping[str, Any]) -> None:
    """A ValueError for an option that `mode` does not know, or a value that it cannot take."""
    known = {*(MODES[mode].__kwdefaults__ or {}), "clip_low", "clip_high"}
    known |= {"lengths"} if mode == "opo" else set()
    for name, value in options.items():
        expected = f"one of {sorted(known)} of mode {mode!r}"
        require(name in known, name, expected, repr(name))
        if name in NUMBERS and not (value is None and name.startswith("clip_")):
            number(name, value, *NUMBERS[name])
        elif name == "each":
            choice("each", value, ("rewards", "centered", "normalized", "rloo", "rloo_normalized"))
        elif name == "weights":
            is_list = isinstance(value, (list, tuple))
            require(is_list, "weights", "a list of numbers", repr(value))
            for x in value:
                number("weights", x, "finite numbers", lambda x: True)
        elif name == "unbiased":
            require(isinstance(value, bool), "unbiased", "True or False", repr(value))
