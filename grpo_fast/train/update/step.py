"""One step of a run, and its state between two updates for a checkpoint."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from grpo_fast.data import Example
from grpo_fast.rewards import RewardResult
from grpo_fast.rollout import Rollout
from grpo_fast.train.collect.collector import Collected
from grpo_fast.train.metrics.clock import Clock
from grpo_fast.train.metrics.losses import LossMetrics
from grpo_fast.train.update.batch import FIXED, StepBatch
from grpo_fast.train.update.updates import Updates


@dataclass
class Step:
    """One step of a run: its completions, the updates made so far, what was measured.

    The next update is that of minibatch `minibatch` in pass `epoch`; `metrics` are there when all
    updates are made and what follows from them is done.
    """

    number: int
    updates: Updates
    clock: Clock
    collected: Collected | None = None
    batch: StepBatch | None = None
    noise: dict[str, float] | None = None
    epoch: int = 0
    minibatch: int = 0
    metrics: dict[str, float] | None = None
    update_rows: list[dict[str, float]] = field(default_factory=list)

    @property
    def place(self) -> int:
        """1 after the rollout, one more with each update, and one more at the end; 0 before."""
        if self.collected is None:
            return 0
        return 1 + len(self.updates) + (self.metrics is not None)

    def done(self, losses: LossMetrics, rate: float, norm: float) -> None:
        """An update is made; the next minibatch comes."""
        self.updates.add(losses, rate, norm)
        self.minibatch += 1

    def state(self) -> dict[str, Any]:
        """Everything that the step cannot compute again."""
        collected, batch, done = self.collected, self.batch, self.updates
        assert collected is not None and batch is not None
        fixed = [name for name in FIXED if batch.has_fixed and batch.has(name)]
        return {
            **{name: getattr(self, name) for name in OWN},
            "rollout": vars(collected.rollout), "total": collected.scores.total,
            "rewards": collected.scores.per_fn, "advantages": collected.advantages,
            "collected_metrics": collected.metrics, "generated": collected.generated,
            "prompts": collected.prompts,
            "batch": {
                "parts": batch.parts, "budget": batch.budget,
                "fixed": {name: batch.of_each(name) for name in fixed},
            },
            "updates": {
                "first": done.first, "norms": done.norms, "rates": done.rates,
                "losses": [vars(losses) for losses in done.losses],
            },
            "seconds": self.clock.seconds, "peaks": self.clock.peaks,
        }  # fmt: skip


# Fields that a checkpoint has as they are.
OWN = ("number", "noise", "epoch", "minibatch", "metrics", "update_rows")


def restore(
    state: dict[str, Any],
    examples: Sequence[Example],
    per_pass: int,
    **options: Any,  # of StepBatch: group_size, minibatches, device, shared, mask_truncated
) -> Step:
    """The step that `Step.state` was called on; prompts are looked up in the training set."""
    rollout, device = Rollout.of_state(state["rollout"]), options["device"]
    count, per_fn = len(rollout.texts), state["rewards"]
    scores = RewardResult(state["total"], per_fn, {name: Counter() for name in per_fn})
    asked = [row["prompt"] for row in state["prompts"] if row["use"] != "dropped"]
    if len(asked) * options["group_size"] != count:
        expected = f"expected {count // options['group_size']} prompts that are kept"
        raise ValueError(f"underway.prompts: {expected}, got {len(asked)}")
    collected = Collected(
        rollout, [examples[number] for number in asked for _ in range(options["group_size"])],
        scores, state["advantages"], state["collected_metrics"], state["generated"],
        state["prompts"],
    )  # fmt: skip
    if sorted(i for part in state["batch"]["parts"] for i in part) != list(range(count)):
        raise ValueError("underway.batch.parts: expected every completion once")
    batch = StepBatch(rollout, collected.advantages, budget=state["batch"]["budget"], **options)
    batch.parts = state["batch"]["parts"]
    batch.pack(batch.budget)
    for name, values in state["batch"]["fixed"].items():
        batch.set(name, [value.to(device) for value in values])
    batch.has_fixed = bool(state["batch"]["fixed"])
    done, updates = Updates(per_pass, state["updates"]["first"]), state["updates"]
    for u, found in enumerate(updates["losses"]):
        done.add(_losses(found, device), updates["rates"][u], updates["norms"][u])
    clock = Clock(state["seconds"], state["peaks"])
    own = {name: state[name] for name in OWN}
    return Step(collected=collected, batch=batch, updates=done, clock=clock, **own)


def _losses(state: dict[str, Any], device: Any) -> LossMetrics:
    losses = LossMetrics()
    losses.parts = [({n: v.to(device) for n, v in part.items()}, k) for part, k in state["parts"]]
    losses.logps = [(ours.to(device), theirs.to(device)) for ours, theirs in state["logps"]]
    losses.optimizer_steps = state["optimizer_steps"]
    return losses
