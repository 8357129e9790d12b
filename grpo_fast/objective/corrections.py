"""Corrections of the policy loss for tokens that were sampled by a different policy."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from grpo_fast.errors import argument_error, choice, conflict, number, require
from grpo_fast.objective.aggregation import Tokens
from grpo_fast.objective.losses import LOG_RATIO_MAX

# The levels that have one ratio per completion. Each has a function that pools the log ratios of
# the tokens of a completion.
POOLS = {"product": Tokens.completion_sum, "geometric": Tokens.completion_mean}
WORDS: dict[str, tuple[str, ...]] = {
    "kind": ("truncate", "mask", "reject"),
    "level": ("token", *POOLS, "worst_token"),
    "ratio": ("old/sampling", "current/sampling", "current/behaviour"),
    "advantages": ("all", "negative"),
}


@dataclasses.dataclass(frozen=True)
class Correction:
    """One correction of the policy loss by a ratio of probabilities.

    Corrections account for the difference between the sampler and the trained policy. A correction
    of kind "truncate" or "mask" is an importance weight. A correction of kind "reject" drops tokens
    or completions. A config may have at most one importance weight.

    Args:
        kind: "truncate" weights by the ratio, clamped to the bounds. "mask" weights by the ratio
            inside the bounds and by 0 outside (IcePop). "reject" weights by 1 inside the bounds and
            by 0 outside.
        low: lower bound of the ratio, a number >= 0. None: no bound.
        high: upper bound of the ratio, a number > low. None: no bound.
        level: "token" uses the ratio of each token. "product" and "geometric" use one ratio per
            completion, the product or the geometric mean of the ratios of its tokens.
            "worst_token", only for "reject", drops a completion if the ratio of one token is
            outside the bounds.
        ratio: the two policies whose probabilities are divided: "old/sampling", "current/sampling"
            or "current/behaviour". "current" is the policy of the forward pass, and "sampling" is
            the sampler. "behaviour" is the sampler, or the old policy if `sampling_logps` is
            missing. No gradient flows through the ratio.
        advantages: "all" lets the correction drop any token. "negative", only for "reject", never
            drops a token with advantage >= 0 (DeepSeek-V3.2).

    Raises:
        ValueError: an unknown choice, bounds in the wrong order, or a level or `advantages` that
            the kind does not support. The message names the field.

    Example:
        >>> from grpo_fast import Correction, LossConfig
        >>> config = LossConfig(corrections=Correction("mask", low=0.5, high=2.0))
        >>> config.corrections[0].kind
        'mask'
    """

    kind: str = "truncate"
    low: float | None = None
    high: float | None = None
    level: str = "token"
    ratio: str = "old/sampling"
    advantages: str = "all"

    def __post_init__(self) -> None:
        for name, choices in WORDS.items():
            choice(f"corrections.{name}", getattr(self, name), choices)
        if self.low is not None:
            number("corrections.low", self.low, "None or a number >= 0", lambda x: x >= 0)
        if self.high is not None:
            number("corrections.high", self.high, "None or a number > 0", lambda x: x > 0)
        if self.low is not None and self.high is not None and not self.low < self.high:
            why = "the lower bound must be below the upper one"
            raise conflict(f"corrections.low={self.low}", f"high={self.high}", why)
        kind = f"kind={self.kind!r}"
        if self.kind != "truncate" and self.low is None and self.high is None:
            raise conflict("corrections.low=None", kind, "it needs a bound, low or high")
        for name, of_reject in (("level", "worst_token"), ("advantages", "negative")):
            if self.kind != "reject" and getattr(self, name) == of_reject:
                raise conflict(f"corrections.{name}={of_reject!r}", kind, "it is for 'reject' only")

    @property
    def weighs(self) -> bool:
        """Return whether the correction multiplies the loss by the ratio."""
        return self.kind != "reject"

    def is_active(self, tokens: Tokens) -> bool:
        """Return whether the correction affects these tokens.

        Without sampling_logps, only a correction with ratio "current/behaviour" affects them.
        """
        return tokens.sampling_logps is not None or self.ratio == "current/behaviour"

    def log_ratio(self, logps: Tensor, old_logps: Tensor, tokens: Tokens) -> Tensor:
        """Return the log ratios (T,) of the tokens at the level of the correction.

        The log ratio is 0 where sampling_logps is NaN, which marks a token that the sampler did not
        score.
        """
        above = old_logps if self.ratio == "old/sampling" else logps
        below = old_logps if tokens.sampling_logps is None else tokens.sampling_logps
        log_ratio = torch.nan_to_num(above - below, nan=0.0)
        pool = POOLS.get(self.level)
        return log_ratio if pool is None else tokens.to_tokens(pool(tokens, log_ratio))

    def inside(self, log_ratio: Tensor, tokens: Tokens) -> Tensor:
        """Return a (T,) mask of the tokens whose ratio is inside the bounds."""
        kept = torch.ones_like(log_ratio, dtype=torch.bool)
        if self.low:  # skip a low of 0, which excludes nothing and has no log
            kept = log_ratio >= math.log(self.low)
        if self.high is not None:
            kept = kept & (log_ratio <= math.log(self.high))
        if self.level == "worst_token":
            kept = tokens.to_tokens(tokens.completion_sum((~kept).float())) == 0
        return kept | (tokens.advantages >= 0) if self.advantages == "negative" else kept

    def weights(self, log_ratio: Tensor, inside: Tensor) -> Tensor:
        """Return the factors (T,) by which the policy losses of the tokens are multiplied."""
        # Clamp the log ratio before exp. Otherwise exp could be inf, and inf times a weight of 0 is
        # NaN.
        ratio = torch.exp(log_ratio.clamp(max=LOG_RATIO_MAX))
        if self.kind == "mask":
            return torch.where(inside, ratio, 0.0)
        return ratio.clamp(min=self.low or 0.0, max=self.high)  # clamp needs at least one bound


DEFAULT = (Correction("truncate", high=3.0),)


def corrections_of(value: object) -> tuple[Correction, ...]:
    """Convert corrections to the tuple that a config stores.

    Args:
        value: a Correction or a dictionary of its fields, a list of these, or None.

    Raises:
        ValueError: the value has an unsupported type, or contains two importance weights.
    """
    if value is None:
        return ()
    # 1. Convert a single correction to a list.
    listed = (value,) if isinstance(value, (Correction, Mapping)) else value
    if not isinstance(listed, Iterable) or isinstance(listed, str):
        raise argument_error("corrections", "Corrections or their fields", repr(value))
    names = {f.name for f in dataclasses.fields(Correction)}
    # 2. Build Corrections from dictionaries of their fields.
    corrections: list[Correction] = []
    for x in listed:
        fits = isinstance(x, Correction) or (isinstance(x, Mapping) and set(x) <= names)
        require(fits, "corrections", f"a Correction or its {sorted(names)}", repr(x))
        corrections.append(x if isinstance(x, Correction) else Correction(**x))
    # 3. Reject two importance weights, which would correct for the same difference twice.
    weighing = [(x.kind, x.level) for x in corrections if x.weighs]
    expected = "one 'truncate' or 'mask' at most (others 'reject'): two would weigh twice"
    require(len(weighing) < 2, "corrections", expected, f"kinds and levels {weighing}")
    return tuple(corrections)
