"""The baseline that follows the run: `advantages: baseline` with `running: true`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from grpo_fast.errors import conflict, number, require


class RunningBaseline:
    """The mean reward of the steps before: at first that of one step, then decay·(what it was) +
    (1 − decay)·(the step's). A step's rewards have no part in their own baseline: a bias.

    Args:
        value: the baseline of the first step.
        decay: what is left of the past with each step.
    """

    def __init__(self, value: float = 0.0, decay: float = 0.9) -> None:
        self.start = float(value)
        self.decay = float(decay)
        self.mean: float | None = None

    @property
    def value(self) -> float:
        """The baseline of the next step."""
        return self.start if self.mean is None else self.mean

    def update(self, rewards: Tensor) -> None:
        """Take in a step's (N,) rewards; NaN marks one without a verdict."""
        mean = float(rewards.double().nanmean())
        if math.isnan(mean):
            return
        self.mean = mean if self.mean is None else self.decay * self.mean + (1 - self.decay) * mean

    def state_dict(self) -> dict[str, float | None]:
        """The running mean, for a checkpoint."""
        return {"mean": self.mean}

    def load_state_dict(self, state: Mapping[str, float | None]) -> None:
        self.mean = state["mean"]


def running_baseline(mode: str, options: Mapping[str, Any]) -> RunningBaseline | None:
    """The baseline that `advantages` and `advantage_options` ask for; None: a constant, or none.

    Without a `value` it is a running one: a constant of 0 would be none.
    """
    known, running = split_options(mode, options)
    if mode != "baseline" or not running.pop("running", "value" not in known):
        return None
    return RunningBaseline(known.get("value", 0.0), **running)


def split_options(mode: str, options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The options of `group_advantages`, and those of a running baseline.

    Raises:
        ValueError: `running` that is no truth value, a `decay` outside [0, 1) or without it.
    """
    names = ("running", "decay") if mode == "baseline" else ()
    known = {name: value for name, value in options.items() if name not in names}
    own = {name: value for name, value in options.items() if name in names}
    running = own.get("running", "value" not in known)
    require(isinstance(running, bool), "running", "true or false", repr(running))
    if "decay" in own:
        number("decay", own["decay"], "a number in [0, 1)", lambda x: 0 <= x < 1)
        if not running:
            why = "only a running baseline decays; set running: true"
            raise conflict(f"decay={own['decay']!r}", "running=false", why)
    return known, own
