"""One step of a run, and its state between two updates for a checkpoint."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from grpo_fast.data import Example
from grpo_fast.rewards import RewardResult
from grpo_fast.rollout import stored
from grpo_fast.rollout.stored import Tensors
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

    def state(self) -> tuple[dict[str, Any], Tensors]:
        """Everything that the step cannot compute again, as JSON and as tensors by name."""
        collected, batch, done = self.collected, self.batch, self.updates
        assert collected is not None and batch is not None
        rollout, scores = collected.rollout, collected.scores
        tensors = {"total": scores.total, "advantages": collected.advantages}
        tensors |= {f"reward/{name}": values for name, values in scores.per_fn.items()}
        lists, of_rollout = stored.store(rollout)
        fixed = [name for name in FIXED if batch.has_fixed and batch.has(name)]
        for name in fixed:
            tensors |= stored.numbered(name, batch.of_each(name))
        for u, losses in enumerate(done.losses):
            for m, (ours, samplers) in enumerate(losses.logps):
                tensors |= {f"update/{u}/{m}/ours": ours, f"update/{u}/{m}/samplers": samplers}
        numbers = {
            "number": self.number, "epoch": self.epoch, "minibatch": self.minibatch,
            "noise": self.noise, "metrics": self.metrics, "update_rows": self.update_rows,
            "rollout": lists,
            "rewards": list(scores.per_fn), "collected_metrics": collected.metrics,
            "generated": collected.generated, "prompts": collected.prompts,
            "batch": {"parts": batch.parts, "budget": batch.budget, "fixed": fixed},
            "updates": {
                "first": done.first, "norms": done.norms, "rates": done.rates,
                "losses": [_losses_state(losses) for losses in done.losses],
            },
            "seconds": self.clock.seconds, "peaks": self.clock.peaks,
        }  # fmt: skip
        return numbers, of_rollout | stored.plain(tensors)


def restore(
    state: dict[str, Any],
    tensors: Tensors,
    examples: Sequence[Example],
    per_pass: int,
    **options: Any,  # of StepBatch: group_size, minibatches, device, shared, mask_truncated
) -> Step:
    """The step that `Step.state` was called on; prompts are looked up in the training set."""
    rollout, device = stored.restore(state["rollout"], tensors), options["device"]
    count = len(rollout.texts)
    names = state["rewards"]
    scores = RewardResult(
        tensors["total"], {n: tensors[f"reward/{n}"] for n in names}, {n: Counter() for n in names}
    )
    asked = [row["prompt"] for row in state["prompts"] if row["use"] != "dropped"]
    if len(asked) * options["group_size"] != count:
        expected = f"expected {count // options['group_size']} prompts that are kept"
        raise ValueError(f"underway.prompts: {expected}, got {len(asked)}")
    collected = Collected(
        rollout, [examples[number] for number in asked for _ in range(options["group_size"])],
        scores, tensors["advantages"], state["collected_metrics"], state["generated"],
        state["prompts"],
    )  # fmt: skip
    if sorted(i for part in state["batch"]["parts"] for i in part) != list(range(count)):
        raise ValueError("underway.batch.parts: expected every completion once")
    batch = StepBatch(rollout, collected.advantages, budget=state["batch"]["budget"], **options)
    batch.parts = state["batch"]["parts"]
    batch.pack(batch.budget)
    for name in state["batch"]["fixed"]:
        batch.set(name, [tensors[f"{name}/{i}"].to(device) for i in range(count)])
    batch.has_fixed = bool(state["batch"]["fixed"])
    done, updates = Updates(per_pass, state["updates"]["first"]), state["updates"]
    for u, found in enumerate(updates["losses"]):
        losses = _losses(found, tensors, u, device)
        done.add(losses, updates["rates"][u], updates["norms"][u])
    clock = Clock(state["seconds"], state["peaks"])
    own = {f.name for f in dataclasses.fields(Step)} - {"collected", "batch", "updates", "clock"}
    rest: dict[str, Any] = {name: state[name] for name in own}
    return Step(collected=collected, batch=batch, updates=done, clock=clock, **rest)


def _losses_state(losses: LossMetrics) -> dict[str, Any]:
    """Numbers of fp32, which a float of JSON holds exactly."""
    parts = [[{n: float(v) for n, v in part.items()}, tokens] for part, tokens in losses.parts]
    return {"parts": parts, "steps": losses.optimizer_steps, "logps": len(losses.logps)}


def _losses(state: dict[str, Any], tensors: Tensors, u: int, device: Any) -> LossMetrics:
    losses = LossMetrics()
    for part, tokens in state["parts"]:
        losses.add({n: torch.tensor(v, device=device) for n, v in part.items()}, tokens)
    for m in range(state["logps"]):
        ours, samplers = (tensors[f"update/{u}/{m}/{who}"] for who in ("ours", "samplers"))
        losses.logps.append((ours.to(device), samplers.to(device)))
    losses.optimizer_steps = state["steps"]
    return losses
