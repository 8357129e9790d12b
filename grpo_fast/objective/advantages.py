"""Group-relative advantages, with one function for each formula. A formula is called a mode.

Mode "baseline" can subtract a running mean of the rewards (`RunningBaseline`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from grpo_fast.errors import (
    argument_error,
    choice,
    conflict,
    kind_of,
    nearest_hint,
    number,
    require,
)

Options = Mapping[str, Any]  # options of a mode

# All mode functions receive (N, G) fp64 rewards, where NaN marks a completion without a reward. A
# function excludes these completions from means, deviations and counts. It may return any advantage
# for them, because `group_advantages` replaces it with 0.


def count(r: Tensor) -> Tensor:
    """Return the number of completions that have a reward in each group, (N, 1)."""
    return (~r.isnan()).sum(-1, keepdim=True)


def highest(r: Tensor) -> Tensor:
    """Return the maximum reward of each group, (N, 1)."""
    return r.nan_to_num(nan=-torch.inf).amax(-1, keepdim=True)


def whitened(a: Tensor, known: Tensor, eps: float = 1e-8) -> Tensor:
    """Scale and shift `a` so that its elements in the mask `known` have mean 0 and variance 1."""
    counted = a[known]
    return (a - counted.mean()) / (counted.std(correction=0) + eps)


def raw_rewards(r: Tensor) -> Tensor:
    """Use the rewards themselves as advantages, A = r."""
    return r


def baseline(r: Tensor, *, value: float = 0.0) -> Tensor:
    """Compute A = r - value with a constant `value`, which does not depend on the batch.

    Source: REINFORCE, Williams 1992
    """
    return r - value


def centered(r: Tensor) -> Tensor:
    """Compute A = r - mean of the group (Dr. GRPO, https://arxiv.org/abs/2503.20783)."""
    return r - r.nanmean(-1, keepdim=True)


def normalized(r: Tensor, *, eps: float = 1e-4, unbiased: bool = True) -> Tensor:
    """Compute A = (r - mean) / (std + eps) with mean and standard deviation of the group.

    Source: DeepSeekMath, https://arxiv.org/abs/2402.03300

    Args:
        r: (N, G), the rewards.
        eps: number added to the standard deviation.
        unbiased: if True, divide the variance by G - 1, as torch does; otherwise by G, as numpy
            does.
    """
    a = centered(r)
    variance = a.square().nansum(-1, keepdim=True) / (count(r) - int(unbiased)).clamp(min=1)
    return a / (variance.sqrt() + eps)


def maximum(r: Tensor) -> Tensor:
    """Compute A = r - mean of the group for the best completions, and A = 0 for all others.

    The best completions have the highest reward of their group. The formula comes from the text of
    the CS336 assignment.
    """
    return torch.where(r == highest(r), centered(r), 0.0)


def maximum_reward(r: Tensor) -> Tensor:
    """Compute A = r for the completions with the highest reward of their group, and 0 for others.

    The formula comes from the code of the CS336 assignment.
    """
    return torch.where(r == highest(r), r, 0.0)


def batch(r: Tensor, *, eps: float = 1e-4, unbiased: bool = True) -> Tensor:
    """Compute A = (r - group mean) / (std of the batch + eps), as TRL's `scale_rewards="batch"`."""
    known = r[~r.isnan()]
    return centered(r) / (known.std(correction=int(unbiased and known.numel() > 1)) + eps)


def rloo(r: Tensor) -> Tensor:
    """Compute A = r - mean reward of the other completions in the group.

    Source: RLOO, https://arxiv.org/abs/2402.14740
    """
    return centered(r) * (count(r) / (count(r) - 1).clamp(min=1))


def rloo_normalized(r: Tensor, *, eps: float = 1e-6) -> Tensor:
    """Compute A = (r - mean of the others) / (std of the others + eps), as NeMo-RL does.

    The mean and the standard deviation are computed over the rewards of the other completions in
    the group. If these rewards are all equal, or only one other reward exists, A is not divided by
    the standard deviation.
    """
    diagonal = torch.eye(r.shape[-1], dtype=torch.bool, device=r.device)
    # Build an (N, G, G) tensor in which row i has the rewards of the group, with NaN instead of the
    # reward of completion i.
    others = torch.where(diagonal, torch.nan, r[:, None, :])
    a = r - others.nanmean(-1)
    deviations = others - others.nanmean(-1, keepdim=True)
    known = (~others.isnan()).sum(-1)
    std = (deviations.square().nansum(-1) / (known - 1).clamp(min=1)).sqrt()
    are_equal = others.nan_to_num(torch.inf).amin(-1) == others.nan_to_num(-torch.inf).amax(-1)
    return a / torch.where(are_equal | (known < 2), 1.0, std + eps)


def reinforce_pp_baseline(r: Tensor, *, eps: float = 1e-8) -> Tensor:
    """Compute A = r - mean of the group, and whiten A over the batch.

    Source: REINFORCE++, https://arxiv.org/abs/2501.03262
    """
    a = centered(r)
    return whitened(a, ~a.isnan(), eps)


def opo(r: Tensor, *, lengths: Tensor) -> Tensor:
    """Compute A = r - Σ l·r / Σ l. The sums are over the group, and l is the completion length.

    Source: OPO, https://arxiv.org/abs/2505.23585

    Args:
        r: (N, G), the rewards.
        lengths: (N, G), number of tokens of each completion.
    """
    weight = torch.where(r.isnan(), 0.0, lengths.to(r))
    return r - (weight * r).nansum(-1, keepdim=True) / weight.sum(-1, keepdim=True).clamp(min=1e-9)


def passk(r: Tensor) -> Tensor:
    """Compute A = best reward - second best reward for the best completion, and 0 for others.

    Source: https://arxiv.org/abs/2503.19595 with k = G
    """
    top = r.nan_to_num(nan=-torch.inf).topk(min(2, r.shape[-1]), dim=-1)
    # Set the gap to 0 in a group with a single reward, because it has no second best reward.
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
    "reinforce_pp_baseline": reinforce_pp_baseline,
    "opo": opo,
    "passk": passk,
}


# For each numeric option, a description of its allowed values for the error message, and a function
# that tests a value.
NUMBERS: dict[str, tuple[str, Callable[[float], bool]]] = {
    "eps": ("a finite number >= 0", lambda x: x >= 0),
    "value": ("a finite number", lambda x: True),
    "clip_low": ("None or a number <= 0", lambda x: x <= 0),
    "clip_high": ("None or a number >= 0", lambda x: x >= 0),
}

# Modes that do not compare completions within a group. They accept groups with one completion, and
# they can give nonzero advantages to a group with equal rewards.
WITHOUT_GROUPS = ("rewards", "baseline")


def group_advantages(
    rewards: Tensor,  # (N*G,)
    mode: str = "normalized",
    *,
    group_size: int | None = None,
    groups: Tensor | Sequence[Hashable] | None = None,
    clip_low: float | None = None,
    clip_high: float | None = None,
    **options: Any,
) -> Tensor:  # (N*G,)
    """Compute group-relative advantages from rewards.

    Pass `group_size` if all groups have the same size and the rewards of a group are adjacent.
    Otherwise, pass `groups`.

    A group with equal rewards gets exactly 0, except with the modes "rewards" and "baseline", which
    do not compare completions within a group. NaN marks a completion without a reward. Such a
    completion is excluded from the statistics of its group and gets advantage 0.

    Args:
        rewards: (N*G,), float. The rewards of all completions. With `group_size`, the G completions
            of a prompt must be adjacent.
        mode: how to compute the advantages: "rewards", "baseline", "centered", "normalized", "max",
            "max_code", "batch", "rloo", "rloo_normalized", "reinforce_pp_baseline", "opo" or
            "passk". The losses page has the formula and the paper of each mode.
        group_size: G, completions per prompt. Must divide the number of rewards. 1 is allowed only
            with the modes "rewards" and "baseline".
        groups: the group of each reward, as a 1-D tensor of integers or a sequence of hashable
            values such as prompt ids. Groups may have different sizes, and their rewards may come
            in any order. A group with one completion gets 0 in modes that compare completions.
        clip_low: lower bound of the advantages, a number <= 0. None: no bound.
        clip_high: upper bound of the advantages, a number >= 0. None: no bound.
        options: options of the mode. "normalized" and "batch" have `eps` and `unbiased`.
            "rloo_normalized" and "reinforce_pp_baseline" have `eps`. "baseline" has `value`, and
            "opo" has `lengths`.

    Returns:
        Advantages, (N*G,), fp32, in the order of the rewards.

    Raises:
        ValueError: an unknown mode or option, a wrong shape, infinite rewards, a group size of 1
            with a mode that compares within groups, or not exactly one of `group_size` and
            `groups`.

    Example:
        >>> import torch
        >>> from grpo_fast import group_advantages
        >>> rewards = torch.tensor([1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0])
        >>> group_advantages(rewards, "centered", group_size=4)
        tensor([ 0.7500, -0.2500, -0.2500, -0.2500,  0.0000,  0.0000,  0.0000,  0.0000])
    """
    # 1. Check the shape, the group size, the values and the options.
    choice("mode", mode, MODES)
    fits = isinstance(rewards, Tensor) and rewards.dim() == 1
    require(fits, "rewards", "a tensor of shape (N*G,)", kind_of(rewards))
    count = len(rewards)
    require(not rewards.is_complex(), "rewards", "real numbers", rewards.dtype)
    expected = "finite values, or NaN for a completion without a reward"
    require(not torch.isinf(rewards).any(), "rewards", expected, "inf")
    cells, shape = _cells(mode, count, group_size, groups)
    cells = cells.to(rewards.device)
    check_options(mode, {"clip_low": clip_low, "clip_high": clip_high, **options})
    if mode == "opo":
        lengths = options.get("lengths")
        if not isinstance(lengths, Tensor) or lengths.shape != rewards.shape:
            expected = f"a tensor of completion lengths (N*G,) = {tuple(rewards.shape)}"
            raise argument_error("lengths", expected, kind_of(lengths))
        fits = bool(((lengths >= 0) & torch.isfinite(lengths)).all())
        require(fits, "lengths", "finite numbers >= 0", "others")
        options["lengths"] = _table(lengths.double(), cells, shape)
    # 2. Compute in fp64, group by group.
    grouped = _table(rewards.double(), cells, shape)
    missing = grouped.isnan()
    if missing.all():  # also for zero rewards, whose deviation would cause a torch warning
        return torch.zeros(count, device=rewards.device)
    advantages = MODES[mode](grouped, **options)
    if mode not in WITHOUT_GROUPS:
        # Set the advantages of a group to 0 if its rewards are equal. Compare the rewards and not
        # the advantages. If the mean of equal rewards is rounded, the advantages are tiny but not
        # 0, and the division by eps amplifies them.
        lowest = grouped.nan_to_num(nan=torch.inf).amin(-1, keepdim=True)
        advantages = torch.where(lowest == highest(grouped), 0.0, advantages)
    # 3. Set the advantages of completions without a reward to 0, apply the bounds, and reject
    # advantages that fp32 cannot represent.
    advantages = torch.where(missing, 0.0, advantages).float()
    advantages = advantages.reshape(-1)[cells]
    if clip_low is not None or clip_high is not None:
        advantages = advantages.clamp(clip_low, clip_high)
    if not torch.isfinite(advantages).all():
        largest = f"{grouped.nan_to_num().abs().max().item():g}"
        raise argument_error("rewards", "advantages within fp32", f"rewards up to {largest}")
    return advantages


def _cells(
    mode: str, count: int, group_size: int | None, groups: Tensor | Sequence[Hashable] | None
) -> tuple[Tensor, tuple[int, int]]:
    """Return the cell of each reward in a table with one row per group, and the table's shape.

    Returns:
        The indices (count,) of the rewards in the flattened table; and the shape, which is the
        number of groups and the size of the largest group.
    """
    if (group_size is None) == (groups is None):
        got = "neither" if groups is None else "both"
        raise argument_error("group_size", "exactly one of group_size and groups", got)
    if group_size is not None:
        is_count = isinstance(group_size, int) and not isinstance(group_size, bool)
        require(is_count and group_size >= 1, "group_size", "an integer >= 1", repr(group_size))
        require(count % group_size == 0, "group_size", f"a divisor of {count} rewards", group_size)
        check_group_size(mode, group_size)
        return torch.arange(count), (count // group_size, group_size)
    is_float = isinstance(groups, Tensor) and groups.is_floating_point()
    ids: Any = groups.tolist() if isinstance(groups, Tensor) else groups
    is_listed = isinstance(ids, Sequence) and not isinstance(ids, str) and not is_float
    # The rows of a tensor with two dimensions are lists, which are not hashable.
    fits = is_listed and all(isinstance(x, Hashable) for x in ids)
    expected = f"a group for each of {count} rewards: a 1-D tensor of integers or a sequence of ids"
    require(fits, "groups", expected, kind_of(groups))
    require(len(ids) == count, "groups", expected, f"{len(ids)} groups")
    members: dict[Hashable, list[int]] = {}
    for place, group in enumerate(ids):
        members.setdefault(group, []).append(place)
    width = max(map(len, members.values()), default=1)
    cells = torch.zeros(count, dtype=torch.long)
    for row, places in enumerate(members.values()):
        cells[places] = torch.arange(len(places)) + row * width
    return cells, (len(members), width)


def _table(values: Tensor, cells: Tensor, shape: tuple[int, int]) -> Tensor:
    """Return values (count,) as a table of groups, with NaN in empty cells."""
    table = values.new_full(shape, torch.nan)
    table.view(-1)[cells] = values
    return table


def check_group_size(mode: str, group_size: int) -> None:
    """Raise a ValueError if the mode compares completions within a group of only one completion."""
    fits = group_size > 1 or mode in WITHOUT_GROUPS
    expected = f"at least 2 of mode {mode!r}"
    require(fits, "group_size", expected, "1: all advantages would be 0")


def check_options(mode: str, options: Options) -> None:
    """Raise a ValueError for an option that the mode does not have, or for an invalid value."""
    known = {*(MODES[mode].__kwdefaults__ or {}), "clip_low", "clip_high"}
    known |= {"lengths"} if mode == "opo" else set()
    for name, value in options.items():
        if name not in known:
            expected = f"one of {sorted(known)} of mode {mode!r}"
            raise argument_error(name, expected, repr(name) + nearest_hint(name, known))
        if name in NUMBERS and not (value is None and name.startswith("clip_")):
            number(name, value, *NUMBERS[name])
        elif name == "unbiased":
            require(isinstance(value, bool), "unbiased", "True or False", repr(value))


# --------------------------------------------------------------------------------- Running baseline
class RunningBaseline:
    """Exponential moving average of the mean reward of previous steps.

    The update is mean = decay·mean + (1 - decay)·(mean reward of the step). The rewards of a step
    do not enter the baseline of the same step, because that would bias the gradient.

    Args:
        value: the baseline of the first step.
        decay: weight of the previous mean in an update.
    """

    def __init__(self, value: float, decay: float) -> None:
        self.start = float(value)
        self.decay = float(decay)
        self.mean: float | None = None

    @property
    def value(self) -> float:
        """Return the baseline of the next step."""
        return self.start if self.mean is None else self.mean

    def update(self, rewards: Tensor) -> None:
        """Update the running mean with the rewards (N,) of a step.

        NaN marks a completion without a reward. Such completions are ignored.
        """
        mean = float(rewards.double().nanmean())
        if math.isnan(mean):
            return
        self.mean = mean if self.mean is None else self.decay * self.mean + (1 - self.decay) * mean


def split_options(mode: str, options: Options) -> tuple[Options, RunningBaseline | None]:
    """Return the options of `group_advantages`, and the running baseline of the mode or None.

    Only mode "baseline" can have one. The option `running` decides. Without `running`, the baseline
    is a constant if the option `value` is given, and a running mean otherwise.

    Raises:
        ValueError: `running` is not a bool, `decay` is outside [0, 1), or `decay` is given without
            a running baseline.
    """
    if mode != "baseline":
        return options, None
    known = dict(options)
    running = known.pop("running", "value" not in known)
    require(isinstance(running, bool), "running", "true or false", repr(running))
    decay = known.pop("decay", 0.9)
    number("decay", decay, "a number in [0, 1)", lambda x: 0 <= x < 1)
    if "decay" in options and not running:
        why = "only a running baseline decays; set running: true"
        raise conflict(f"decay={decay!r}", "running=false", why)
    return known, RunningBaseline(known.get("value", 0.0), decay) if running else None
