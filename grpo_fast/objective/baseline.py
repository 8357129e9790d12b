"""Running mean of rewards, which the advantage mode "baseline" can subtract from the rewards."""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import Tensor

from grpo_fast.errors import conflict, number, require
from grpo_fast.objective.advantages import Options


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

    def state_dict(self) -> dict[str, float | None]:
        """Return the running mean for a checkpoint."""
        return {"mean": self.mean}

    def load_state_dict(self, state: Mapping[str, float | None]) -> None:
        self.mean = state["mean"]


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
