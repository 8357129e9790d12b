"""Corrections: weights and masks for tokens that another policy sampled; one weighs at most."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from grpo_fast.errors import argument_error, choice, conflict, names_nearest, number, require
from grpo_fast.objective.losses import LOG_RATIO_MAX
from grpo_fast.objective.tokens import Tokens

# What a ratio's log is pooled by: (T,) of the tokens → (T,).
LEVELS: dict[str, Callable[[Tokens, Tensor], Tensor]] = {
    "token": lambda tokens, x: x,
    "product": lambda tokens, x: tokens.to_tokens(tokens.completion_sum(x)),
    "geometric": lambda tokens, x: tokens.to_tokens(tokens.completion_mean(x)),
    "worst_token": lambda tokens, x: x,
}
WORDS: dict[str, tuple[str, ...]] = {
    "kind": ("truncate", "mask", "reject"),
    "level": tuple(LEVELS),
    "ratio": ("old/sampling", "current/sampling", "current/behaviour"),
    "advantages": ("all", "negative"),
}


@names_nearest
@dataclasses.dataclass(frozen=True)
class Correction:
    """One correction of the policy term by a ratio of probabilities.

    Attributes:
        kind: "truncate" weighs by the ratio, moved into the bounds; "mask" weighs by the ratio, 0
            outside of them (IcePop); "reject" weighs 1 inside and 0 outside.
        low, high: bounds of the ratio, 0 <= low < high; None: none on that side. They need not
            contain 1.
        level: "token", or one ratio per completion: the "product" of its tokens' or their
            "geometric" mean. "worst_token", of "reject", drops a completion for one token outside.
        ratio: of the old policy, or of the current one without its gradient, to the sampler;
            "current/behaviour" divides by the old policy where there are no `sampling_logps`.
        advantages: "negative": a token whose advantage is >= 0 is always kept (DeepSeek-V3.2).

    Raises:
        ValueError: an unknown word, bounds in the wrong order, a level or `advantages` that the
            kind cannot have; the message names the field.
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
        return self.kind != "reject"

    def is_read(self, tokens: Tokens) -> bool:
        """False without the sampler's logps, unless the old policy may stand for them."""
        return tokens.sampling_logps is not None or self.ratio == "current/behaviour"

    def log_ratio(self, logps: Tensor, old_logps: Tensor, tokens: Tokens) -> Tensor:
        """(T,) at its level; 0 at a NaN sampling_logp: a token that the sampler did not score."""
        above = old_logps if self.ratio == "old/sampling" else logps
        below = old_logps if tokens.sampling_logps is None else tokens.sampling_logps
        return LEVELS[self.level](tokens, torch.nan_to_num(above - below, nan=0.0))

    def inside(self, log_ratio: Tensor, tokens: Tokens) -> Tensor:
        kept = torch.ones_like(log_ratio, dtype=torch.bool)
        if self.low:  # 0 has no log, and bounds nothing
            kept = log_ratio >= math.log(self.low)
        if self.high is not None:
            kept = kept & (log_ratio <= math.log(self.high))
        if self.level == "worst_token":
            kept = tokens.to_tokens(tokens.completion_sum((~kept).float())) == 0
        return kept | (tokens.advantages >= 0) if self.advantages == "negative" else kept

    def weights(self, log_ratio: Tensor, inside: Tensor) -> Tensor:
        ratio = torch.exp(log_ratio.clamp(max=LOG_RATIO_MAX))
        if self.kind == "mask":
            return torch.where(inside, ratio, 0.0)
        bounded = self.low is not None or self.high is not None
        return ratio.clamp(min=self.low, max=self.high) if bounded else ratio


DEFAULT = (Correction("truncate", high=3.0),)


def corrections_of(value: object) -> tuple[Correction, ...]:
    """One correction or several, as objects or as their fields, as the tuple that a config holds.

    Raises:
        ValueError: something else, or two that weigh.
    """
    if value is None:
        return ()
    listed = (value,) if isinstance(value, (Correction, Mapping)) else value
    if not isinstance(listed, Iterable) or isinstance(listed, str):
        raise argument_error("corrections", "Corrections or their fields", repr(value))
    names = {f.name for f in dataclasses.fields(Correction)}
    corrections: list[Correction] = []
    for x in listed:
        if isinstance(x, Correction):
            corrections.append(x)
        elif isinstance(x, Mapping) and set(x) <= names:
            corrections.append(Correction(**x))
        else:
            raise argument_error("corrections", f"a Correction or its {sorted(names)}", repr(x))
    weighing = [(x.kind, x.level) for x in corrections if x.weighs]
    expected = "one 'truncate' or 'mask' at most (others 'reject'): two would weigh twice"
    require(len(weighing) < 2, "corrections", expected, f"kinds and levels {weighing}")
    return tuple(corrections)
